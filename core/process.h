#pragma once
/// The identity of a process: files of a process that has ended are told from those of a live one by it.

#include <cstdint>
#include <string>

namespace tranche::detail {

/// A process, told apart from every other one, on this node and on others, now and earlier.
struct ProcessIdentity {
  std::string node;
  std::string kernel;         ///< of the boot and the container: within it, process numbers mean the same
  std::int64_t process = 0;   ///< its number...
  std::uint64_t started = 0;  ///< ...and when it was started (ticks since the boot), as numbers come again
  /// True when numbers of the other's processes mean the same here.
  bool same_kernel(const ProcessIdentity& other) const {
    return node == other.node && kernel == other.kernel;
  }
  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};
ProcessIdentity this_process();

/// False for one that has ended, whose number another has by now, or that waits to be buried. Only for
/// processes of this kernel (same_kernel); of another nothing can be known, and the answer is false.
bool is_running(const ProcessIdentity& identity);

}  // namespace tranche::detail
