#pragma once
/// Signals as requests: SIGUSR1, SIGUSR2 and SIGTERM to save and end, the way batch systems send them before
/// they take a node away; SIGHUP, which comes when the terminal closes; and SIGINT, the way people do. SIGINT
/// and SIGTERM ask a study to end its run and to tell what is there.

#include <signal.h>

#include <array>
#include <string>
#include <vector>

namespace tranche::training {

/// While it lives its signals end nothing: they wait until poll() asks for them. There is one at a time,
/// made on the process's main thread, as early as can be: threads that start later inherit that the signals
/// are not for them, and those that libraries had started before pass them on to the main thread.
class StopSignals {
 public:
  static constexpr std::array<int, 4> signals{SIGUSR1, SIGUSR2, SIGTERM, SIGHUP};

  /// Takes `signals`; and SIGINT, of which only the first is a request: a second one ends the process at
  /// once, whatever it does, as people expect. A SIGHUP that is ignored (nohup) stays ignored, and so does a
  /// SIGINT (a script's background job). Throws LogicError on another thread than the process's first.
  StopSignals();
  /// None of the signals `which` ends the process from now on.
  explicit StopSignals(std::vector<int> which);
  /// Forgets signals that have come and were not asked for; then signals do what they did before.
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// Number of the first of the signals that has come so far, 0 for none; stays once it is set. Further ones
  /// ask for the same and change nothing. From the thread that made this.
  int poll();

 private:
  sigset_t set() const;
  void take_first_interrupt();
  std::vector<int> which_;
  int received_ = 0;
  sigset_t mask_before_{};
  std::vector<struct sigaction> actions_before_;
  bool takes_interrupt_ = false;
  struct sigaction interrupt_before_ {};
};

/// "SIGUSR1".
std::string name_of_signal(int signal);

}  // namespace tranche::training
