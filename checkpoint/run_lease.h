#pragma once
/// One process at a time in a folder: of checkpoints, or of other work.

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tranche::checkpoint {

inline constexpr std::string_view lease_name = "run.lock";

struct LeaseOptions {
  double beat_seconds = 5;    ///< between two signs of life of a holder
  double stale_seconds = 30;  ///< without one, after which a holder on another node counts as dead
  /// Gets a line when take() has to wait, at most stale_seconds.
  std::function<void(const std::string& line)> say;
  /// The advice that a refusal gives behind the name of the holder.
  std::string advice =
      "two runs cannot share a folder of checkpoints; give this one its own, or end the other";
};

/// The right of this process to save into a folder and to remove from it, from take() to destruction: the
/// file `run.lock` there, which names its holder (node, boot, process) and which the holder keeps locked
/// (flock) and writes to every beat_seconds. It is empty when nobody holds it, and stays.
///
/// A run that finds it held is refused, and learns by whom. A holder that has died is succeeded: at once if
/// it was a process of this kernel, which can be asked; if it was one of another node, boot or container only
/// when it has shown no sign of life for stale_seconds (watched by this process' clock, so that clocks of
/// nodes need not agree; a lock cannot tell, since not all file systems show locks to other nodes).
///
/// All engines of a process share its lease: taking it again is no conflict. Threads may use one object at
/// the same time.
class RunLease {
 public:
  /// The folder must be there. Throws CheckpointError when another process holds it, or the file cannot be
  /// written.
  static RunLease take(const std::string& folder, const LeaseOptions& options = {});
  RunLease(RunLease&&) noexcept;
  RunLease& operator=(RunLease&&) = delete;
  ~RunLease();

  /// True once another process was seen to have taken it over, which happens to a process that is stopped for
  /// longer than stale_seconds; looked at every beat_seconds. Costs nothing.
  bool lost() const noexcept;
  /// Reads the file: returns while this process holds it; takes it again where it was removed or given back.
  /// Throws CheckpointError that names who has it now.
  void require_held();

 private:
  struct Impl;
  explicit RunLease(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::checkpoint
