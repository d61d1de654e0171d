#pragma once
/// The work that a run on the meta device asks of its streams, as a graph: every piece of work with its cost,
/// the stream it is on, and what it waits for. Simulations of a step's time are made from it.

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
  kernel,          ///< on a stream
  copy_to_host,    ///< from device memory
  copy_from_host,  ///< to device memory
  collective,      ///< of a communicator
  disk_read,
  disk_write,
  send,     ///< of a message: nothing by itself, because the receive takes its time
  receive,  ///< of a message; the n-th from a rank is the n-th that it sends to this one
  join,     ///< nothing: a point behind several others (the host has waited, say)
  mark      ///< nothing: a place in the program, named by who records
};
std::string_view name_of(WorkKind kind);

/// The matrix product in a kernel's work; no rows: none. c[m, n] = op(a)[m, k] op(b)[k, n].
struct GemmShape {
  std::int64_t m = 0, n = 0, k = 0;
  DataType dtype = DataType::float32;
  bool transpose_a = false, transpose_b = false;
  friend bool operator==(const GemmShape&, const GemmShape&) = default;
};

struct RecordedWork {
  WorkKind kind = WorkKind::join;
  std::string name;    ///< of the kernel ("matmul"), the operation ("all_gather"), the mark
  std::string detail;  ///< the unit, where one is known
  int lane = 0;
  double operations = 0, bytes_read = 0, bytes_written = 0;
  GemmShape gemm;
  DataType dtype = DataType::float32;  ///< kernels: of the first operand where known; collectives: sent
  /// Collectives: bytes of all ranks' parts together, as they are sent, and ranks of the group.
  double full_bytes = 0;
  int ranks = 0;
  int ranks_on_node = 0;  ///< the most of them that share one
  /// Collectives: the group's ranks of the run. Messages: the other rank, alone. Null: not known.
  std::shared_ptr<const std::vector<int>> members;
  double seconds = 0;      ///< that it took, where it was done and timed
  std::vector<int> after;  ///< indices of what must be done before; lower than its own
};

/// A queue of work: in the order of issue, or (ordered = false) as soon as what it waits for is done.
struct RecordedLane {
  std::string name;
  bool ordered = true;
};

/// Used by the issuing thread alone, and shared by the events that it makes. Lane 0 is the host: what runs
/// inline on the issuing thread, and its own waits. Everything issued waits for what the host did before.
class WorkRecorder : public std::enable_shared_from_this<WorkRecorder> {
 public:
  /// `inline_compute`: kernels of a device's compute stream run on the issuing thread, as on CPUs.
  static std::shared_ptr<WorkRecorder> make(bool inline_compute);
  bool inline_compute() const noexcept { return inline_compute_; }

  /// A further lane.
  int add_lane(std::string name, bool ordered = true);
  static constexpr int host_lane = 0;

  /// Adds work to `lane`, behind what it was told to wait for, `after`, and the host; returns the event of
  /// its end. Work on the host lane is done when it is issued.
  Event add(int lane, RecordedWork work, std::span<const Event> after = {});
  /// Later work of `lane` waits for `event`. Events of other recorders and of none are passed.
  void wait(int lane, const Event& event);
  /// The point behind everything that `lane` was given.
  Event point(int lane);
  /// The latest work of the host lane, if nobody has said so yet, took so long.
  void took(double seconds);
  /// A place in the host's program.
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
  std::vector<int> last_;                  ///< by lane: its latest work, -1: none
  std::vector<std::vector<int>> waiting_;  ///< by lane: what its next work waits for
  std::vector<RecordedWork> work_;
  std::vector<bool> passed_;  ///< by work: the host knows that it is done
};

}  // namespace tranche::detail
