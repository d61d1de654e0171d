#include "tranche/training/stop_signals.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include "tranche/core/error.h"

namespace tranche::training {

namespace {

/// A signal to the process may be delivered to any thread that does not block it, and math libraries start
/// threads before main(). The main thread, whose id is the process's, blocks it, so that it stays pending
/// there.
extern "C" void pass_on_to_main_thread(int signal) {
  const int error = errno;
  const pid_t process = getpid();
  syscall(SYS_tgkill, process, process, signal);
  errno = error;
}

/// Runs once, because its action is then reset to the default: the first SIGINT is converted to a SIGTERM,
/// marked as such, and stays pending for poll(). SIGINT itself is never blocked, so a second one meets the
/// default action.
extern "C" void ask_as_terminate(int signal) {
  const int error = errno;
  siginfo_t info{};
  info.si_signo = SIGTERM;
  info.si_code = SI_QUEUE;
  info.si_pid = getpid();
  info.si_uid = getuid();
  info.si_value.sival_int = signal;
  syscall(SYS_rt_tgsigqueueinfo, info.si_pid, info.si_pid, SIGTERM, &info);
  errno = error;
}

int take(const sigset_t& set) {
  const timespec now{0, 0};
  siginfo_t info{};
  int signal = 0;
  do {
    signal = sigtimedwait(&set, &info, &now);
  } while (signal < 0 && errno == EINTR);
  if (signal == SIGTERM && info.si_code == SI_QUEUE && info.si_value.sival_int == SIGINT) return SIGINT;
  return signal > 0 ? signal : 0;
}

/// The signals, without those that the parent had this process ignore: SIGHUP by nohup, SIGPIPE by services.
std::vector<int> without_ignored_ones() {
  std::vector<int> taken(StopSignals::signals.begin(), StopSignals::signals.end());
  std::erase_if(taken, [](int signal) {
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    return (signal == SIGHUP || signal == SIGPIPE) && action.sa_handler == SIG_IGN;
  });
  return taken;
}

}  // namespace

sigset_t StopSignals::set() const {
  sigset_t all;
  sigemptyset(&all);
  for (const int signal : which_) sigaddset(&all, signal);
  return all;
}

StopSignals::StopSignals(std::vector<int> which) : which_(std::move(which)), actions_before_(which_.size()) {
  if (syscall(SYS_gettid) != getpid()) {
    throw LogicError("signals that ask for a stop can be taken by the process's main thread only");
  }
  const sigset_t all = set();
  pthread_sigmask(SIG_BLOCK, &all, &mask_before_);
  struct sigaction action {};
  action.sa_handler = pass_on_to_main_thread;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < which_.size(); ++i) sigaction(which_[i], &action, &actions_before_[i]);
}

StopSignals::StopSignals() : StopSignals(without_ignored_ones()) {
  take_first_interrupt();
}

void StopSignals::take_first_interrupt() {
  sigaction(SIGINT, nullptr, &interrupt_before_);
  if (interrupt_before_.sa_handler == SIG_IGN) return;
  struct sigaction action {};
  action.sa_handler = ask_as_terminate;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  takes_interrupt_ = sigaction(SIGINT, &action, nullptr) == 0;
}

StopSignals::~StopSignals() {
  if (kept_) return;
  if (takes_interrupt_) sigaction(SIGINT, &interrupt_before_, nullptr);
  const sigset_t all = set();
  while (take(all) != 0) {
  }
  for (std::size_t i = 0; i < which_.size(); ++i) sigaction(which_[i], &actions_before_[i], nullptr);
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
}

int StopSignals::poll() {
  const sigset_t all = set();
  while (const int signal = take(all)) {
    if (received_ == 0) received_ = signal;
  }
  return received_;
}

std::string name_of_signal(int signal) {
  const char* name = sigabbrev_np(signal);
  return name == nullptr ? "signal " + std::to_string(signal) : std::string("SIG") + name;
}

}  // namespace tranche::training
