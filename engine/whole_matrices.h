#pragma once
/// Updates tensors that one rank computes as a whole (Muon). Ranks send their shards of the prepared values
/// to the matrix's owner, which sends back the shards of the result. Private to engine/.

#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/flat_updater.h"
#include "engine/matrix_exchange.h"
#include "engine/state_store.h"
#include "tranche/comm/communicator.h"
#include "tranche/device/step_arena.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// The plan is a function of the placement and of the groups. A matrix is computed once among the ranks that
/// have parts of it: those of the shards and of the axis `tensor`, in each replica, or with
/// Replicate::parameters all ranks of a stage. If every rank keeps all of the state (stage 0), the owner
/// already has the matrix, and sends the result to all. If `tensor` cuts the matrix, its owner first
/// assembles the parts.
class WholeMatrices {
 public:
  /// All arguments must outlive it. Throws errors of `ranks_of`, such as those of DataGroups::of_matrices().
  WholeMatrices(StateStore& store, const Config& config, FlatUpdater& updater, const Optimizer& optimizer,
                const MatrixRanksOf& ranks_of, Device& device, StepArena& arena);

  bool any() const { return !plan_.exchanges.empty(); }
  /// Allocates host memory for state in host memory or on disk.
  void allocate(MemoryResource& host_memory);
  /// Updates their flat buffers and starts gathering the new weights; a skipped step sends the same messages.
  /// Three buffers are in flight at a time, so that messages overlap with the matrix products of others.
  /// State on the nvme tier is read and written twice: before its message and after it.
  void update(const OptimizerStep& step);
  /// The buffers in the order in which update() visits their state.
  std::vector<const FlatBuffer*> visits() const;

  /// Elements and bytes that this rank sends along an axis in a step.
  TrafficCount sent(MeshAxis axis) const;
  TrafficCount sent() const;
  /// The largest load of a rank of this rank's group divided by the mean.
  double load_ratio() const { return plan_.load_ratio; }

 private:
  /// The memory and events of a buffer whose update is in flight.
  struct Flight {
    StepBuffer message, matrices;
    void* host_message = nullptr;
    Event arrived;
    std::vector<Event> returned;
  };

  std::int64_t bytes_of_message(std::int64_t elements) const;
  /// A place in a message, and some of its elements from there on.
  void* at(void* data, std::int64_t element) const;
  TensorView message_view(void* data, std::int64_t first, std::int64_t elements) const;
  template <class Visit>
  void for_each_piece(const MatrixExchange& exchange, const ShardSlice& slice, void* message,
                      const Visit& visit) const;
  StepBuffer acquire(std::int64_t bytes, Category category, std::string_view tag);
  void copy_part(const MatrixExchange::Matrix& matrix, const MatrixExchange::Part& part, void* whole,
                 void* parts, bool back);
  void begin(MatrixExchange& exchange, Flight& flight, const OptimizerStep& step);
  void compute(MatrixExchange& exchange, Flight& flight, const OptimizerStep& step);
  void finish(MatrixExchange& exchange, Flight& flight, const OptimizerStep& step);

  StateStore& store_;
  const Config& config_;
  FlatUpdater& updater_;
  const Optimizer& optimizer_;
  StepArena& arena_;
  Stream& compute_;
  DataType message_type_;  ///< fp32 where the compute dtype is, so that no rounding is added; otherwise bf16
  MatrixPlan plan_;
  std::vector<Buffer> host_messages_;  ///< one for each buffer in flight
  Buffer host_scratch_;
  bool passed_ = false;  ///< the arena has had a pass
};

}  // namespace tranche::detail
