#pragma once
/// Signals as requests to save and end: SIGUSR1, SIGUSR2 and SIGTERM, which batch systems send before they
/// take a node away; SIGHUP, which arrives when the terminal closes; SIGPIPE, which arrives when what reads
/// the output is gone (`| tee log` in a closed terminal); and SIGINT, which people send. SIGINT and SIGTERM
/// ask a study to end its run and to report the results so far.

#include <signal.h>

#include <array>
#include <string>
#include <vector>

namespace tranche::training {

/// During its lifetime its signals end nothing: they are pending until poll() reads them. There is one object
/// at a time, made on the process's main thread as early as possible: threads that start later inherit the
/// blocked signals, and threads that libraries started before pass them on to the main thread.
class StopSignals {
 public:
  static constexpr std::array<int, 5> signals{SIGUSR1, SIGUSR2, SIGTERM, SIGHUP, SIGPIPE};

  /// Handles `signals`; and SIGINT, whose first arrival is a request, while a second one ends the process at
  /// once, as people expect. An ignored SIGHUP (nohup) or SIGPIPE stays ignored, and so does an ignored
  /// SIGINT (a script's background job). Throws LogicError on a thread other than the process's first.
  StopSignals();
  /// None of the signals `which` ends the process from now on.
  explicit StopSignals(std::vector<int> which);
  /// Discards pending signals; afterwards signals have their former actions, except after keep_until_exit().
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The number of the first signal that has arrived, 0 for none; it does not change once set. Later signals
  /// have no further effect. Call it on the thread that made this object.
  int poll();
  /// After this object's end its signals still have no effect, until the process exits. A run that was asked
  /// to stop then exits with its own status, even if whoever asked repeats the signal while it exits. A
  /// second SIGINT still ends the process at once.
  void keep_until_exit() { kept_ = true; }

 private:
  sigset_t set() const;
  void take_first_interrupt();
  std::vector<int> which_;
  int received_ = 0;
  sigset_t mask_before_{};
  std::vector<struct sigaction> actions_before_;
  bool takes_interrupt_ = false;
  bool kept_ = false;
  struct sigaction interrupt_before_ {};
};

/// "SIGUSR1".
std::string name_of_signal(int signal);

}  // namespace tranche::training
