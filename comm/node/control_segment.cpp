#include "comm/node/control_segment.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace tranche::comm {

// std::atomic::notify_all only works within one process.
void ControlSegment::notify() noexcept {
  notifications.fetch_add(1);
  if (waiters.load() == 0) return;
  syscall(SYS_futex, &notifications, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace tranche::comm
