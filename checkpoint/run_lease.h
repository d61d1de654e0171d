#pragma once
/// A lease on a folder, of checkpoints or of other work: one process at a time holds it.

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tranche::checkpoint {

inline constexpr std::string_view lease_name = "run.lock";

struct LeaseOptions {
  double beat_seconds = 5;    ///< between two heartbeats of a holder
  double stale_seconds = 30;  ///< after this time without one, a holder on another node counts as dead
  /// Called with a line when take() has to wait, at most stale_seconds.
  std::function<void(const std::string& line)> say;
  /// The advice that follows the holder's name in a refusal.
  std::string advice =
      "two runs cannot share a folder of checkpoints; give this one its own, or end the other";
};

/// The right of this process to save into a folder and to remove from it, from take() to destruction. It is
/// the file `run.lock` there, which names its holder (node, boot, process); the holder keeps it locked
/// (flock) and writes to it every beat_seconds. It is empty while nobody holds it, and is not removed.
///
/// A run that finds it held by a live process is refused, with the holder's name. A dead holder is replaced:
/// at once if it was a process of this kernel, which can be looked up; if it was one of another node, boot or
/// container, only when it has sent no heartbeat for stale_seconds (measured by this process' clock, so that
/// clocks of nodes need not agree; a lock is no evidence, because not all file systems show locks to other
/// nodes).
///
///     free (empty) --take()--> held, a heartbeat every beat_seconds --destruction--> free
///     held --its process ended, or no heartbeat for stale_seconds--> held by the process that calls take()
///
/// All engines of a process share its lease: taking it again is no conflict. Several threads may use one
/// object at the same time.
class RunLease {
 public:
  /// The folder must exist. Throws CheckpointError when another process holds it, or the file cannot be
  /// written.
  static RunLease take(const std::string& folder, const LeaseOptions& options = {});
  RunLease(RunLease&&) noexcept;
  RunLease& operator=(RunLease&&) = delete;
  ~RunLease();

  /// True once another process has taken it over, as happens when a process is stopped for longer than
  /// stale_seconds. It is checked every beat_seconds, so the call costs nothing.
  bool lost() const noexcept;
  /// Reads the file: returns if this process holds the lease; takes it again if the file was removed or
  /// emptied. Throws CheckpointError naming the present holder otherwise.
  void require_held();

 private:
  struct Impl;
  explicit RunLease(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::checkpoint
