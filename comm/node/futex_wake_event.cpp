#include "comm/node/futex_wake_event.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace tranche::comm {

void FutexWakeEvent::wait(std::uint32_t seen, std::chrono::microseconds longest) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(longest - seconds);
  const timespec time{static_cast<time_t>(seconds.count()), static_cast<long>(nanoseconds.count())};
  // The waiter is counted before the futex compares: the comparison detects an earlier notification, and a
  // later one sees the waiter.
  segment_.waiters.fetch_add(1);
  syscall(SYS_futex, &segment_.notifications, FUTEX_WAIT, seen, &time, nullptr, 0);
  segment_.waiters.fetch_sub(1);
}

}  // namespace tranche::comm
