#pragma once
/// The identity of a process. It distinguishes files of a process that has ended from those of a live one.

#include <cstdint>
#include <string>

namespace tranche::detail {

/// Identifies a process among all others, on this node and on other nodes, now and earlier.
struct ProcessIdentity {
  std::string node;
  std::string kernel;         ///< boot and container: process numbers are comparable within it
  std::int64_t process = 0;   ///< the process number
  std::uint64_t started = 0;  ///< start time (ticks since the boot), as numbers are reused
  /// True when the other's process numbers are comparable with those seen here.
  bool same_kernel(const ProcessIdentity& other) const {
    return node == other.node && kernel == other.kernel;
  }
  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};
ProcessIdentity this_process();

/// False for a process that has ended, also when its number was reused or it is a zombie. Call it only for
/// processes of this kernel (same_kernel); for others it returns false, because nothing can be known.
bool is_running(const ProcessIdentity& identity);

}  // namespace tranche::detail
