#pragma once
/// The work that a run on the meta device issues to its streams, as a graph: every item of work with its
/// cost, its row (stream) and its dependencies. Simulations compute a step's time from it.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/core/dtype.h"
#include "tranche/device/event.h"

namespace tranche::detail {

enum class WorkKind : std::uint8_t {
  kernel,          ///< runs on a stream
  copy_to_host,    ///< from device memory
  copy_from_host,  ///< to device memory
  collective,      ///< runs on a communicator
  disk_read,
  disk_write,
  join,  ///< costs nothing: a point after several others (a wait of the host, for example)
  mark   ///< costs nothing: a named place in the program
};
std::string_view name_of(WorkKind kind);

/// The GEMM of a kernel's work; rows = 0: none. c[m, n] = op(a)[m, k] op(b)[k, n].
struct GemmShape {
  std::int64_t m = 0, n = 0, k = 0;
  DataType dtype = DataType::float32;
  bool transpose_a = false, transpose_b = false;
  friend bool operator==(const GemmShape&, const GemmShape&) = default;
};

struct RecordedWork {
  WorkKind kind = WorkKind::join;
  std::string name;    ///< the kernel ("matmul"), the operation ("all_gather") or the mark
  std::string detail;  ///< the unit, if known
  int lane = 0;
  double operations = 0, bytes_read = 0, bytes_written = 0;
  GemmShape gemm;
  DataType dtype = DataType::float32;  ///< kernels: the first operand's, if known; collectives: the one sent
  /// Collectives: the bytes of all ranks' parts together, as sent, and the number of ranks in the group.
  double full_bytes = 0;
  int ranks = 0;
  int ranks_on_node = 0;   ///< the largest number of them on one node
  double seconds = 0;      ///< the measured duration, if it was executed and timed
  std::vector<int> after;  ///< indices of its dependencies, all lower than its own
};

/// A queue of work (a lane of the timeline). It runs in the order of issue, or (ordered = false) each item as
/// soon as its dependencies are done.
struct RecordedLane {
  std::string name;
  bool ordered = true;
};

/// Used by the issuing thread alone, and shared by the events that it makes. Lane 0 is the host: work that
/// runs inline on the issuing thread, and the host's own waits. Everything issued depends on the host's
/// earlier work.
class WorkRecorder : public std::enable_shared_from_this<WorkRecorder> {
 public:
  /// `inline_compute`: kernels of a device's compute stream run on the issuing thread, as on CPUs.
  static std::shared_ptr<WorkRecorder> make(bool inline_compute);
  bool inline_compute() const noexcept { return inline_compute_; }

  /// Adds a lane and returns its number.
  int add_lane(std::string name, bool ordered = true);
  static constexpr int host_lane = 0;

  /// Adds work to `lane`. It depends on the events passed to wait(), on `after`, and on the host; returns the
  /// event of its end. Work on the host lane is done when it is issued.
  Event add(int lane, RecordedWork work, std::span<const Event> after = {});
  /// Makes later work of `lane` depend on `event`. Empty events and those of other recorders count as passed.
  void wait(int lane, const Event& event);
  /// The point after all work issued to `lane`.
  Event point(int lane);
  /// Sets the duration of the host lane's latest work, unless it is already set.
  void took(double seconds);
  /// Adds a named place in the host's program.
  void mark(std::string name);

  const std::vector<RecordedWork>& work() const noexcept { return work_; }
  const std::vector<RecordedLane>& lanes() const noexcept { return lanes_; }

 private:
  class Point;
  explicit WorkRecorder(bool inline_compute);
  int index_of(const Event& event) const;
  Event event_of(int index);
  int append(RecordedWork work);
  void pass(int index);
  void host_wait(int index);

  bool inline_compute_;
  std::vector<RecordedLane> lanes_;
  std::vector<int> last_;                  ///< by lane: its latest work; -1: none
  std::vector<std::vector<int>> waiting_;  ///< by lane: the dependencies of its next work
  std::vector<RecordedWork> work_;
  std::vector<bool> passed_;  ///< by work: the host knows that it is done
};

}  // namespace tranche::detail
