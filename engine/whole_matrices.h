#pragma once
/// The update of tensors that one rank each computes whole (Muon): shards of what the rule prepared go to the
/// owner of their matrix, and shards of what it makes of that come back. Private to engine/.

#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/data_groups.h"
#include "engine/flat_updater.h"
#include "engine/matrix_exchange.h"
#include "engine/state_store.h"
#include "tranche/comm/communicator.h"
#include "tranche/device/step_arena.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// The plan is a function of the placement and of groups. A matrix is computed once among the ranks that have
/// parts of it: those of the shards and of the axis `tensor`, in each replica, or with Replicate::parameters
/// all ranks of a stage. Where every rank keeps all of the state (stage 0) the owner has the matrix already,
/// and the result goes to all. Where `tensor` cuts the matrix, its owner puts the parts together first.
class WholeMatrices {
 public:
  /// All arguments outlive it. Throws as DataGroups::of_matrices() does, which it asks.
  WholeMatrices(StateStore& store, const Config& config, FlatUpdater& updater, const Optimizer& optimizer,
                DataGroups& groups, Device& device, StepArena& arena);

  bool any() const { return !plan_.exchanges.empty(); }
  /// Takes host memory for state that lives there or on disk.
  void allocate(MemoryResource& host_memory);
  /// Updates their flat buffers and begins to gather the new weights; a skipped step sends the same messages.
  /// Three buffers are under way at a time, so that messages pass behind the products of others. State on the
  /// nvme tier is read and written twice, before its message and behind it.
  void update(const OptimizerStep& step);

  /// Elements and bytes that this rank sends along an axis in a step.
  TrafficCount sent(MeshAxis axis) const;
  TrafficCount sent() const;
  /// The greatest load of a rank of this one's group over the mean.
  double load_ratio() const { return plan_.load_ratio; }

 private:
  /// The messages and matrices of a buffer whose update is under way.
  struct Flight {
    StepBuffer message, matrices;
    void* host_message = nullptr;
    Event arrived;
    std::vector<Event> returned;
  };

  template <class Visit>
  static void for_each_piece(const MatrixExchange& exchange, const ShardSlice& slice, void* message,
                             const Visit& visit);
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
  MatrixPlan plan_;
  std::vector<Buffer> host_messages_;  ///< one for each buffer under way
  Buffer host_scratch_;
  bool passed_ = false;  ///< the arena has seen a pass
};

}  // namespace tranche::detail
