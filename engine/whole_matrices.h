#pragma once
/// The update of tensors that one rank each computes whole (Muon): shards of what the rule prepared go to the
/// owner of their matrix, and shards of what it makes of that come back. Private to engine/.

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "engine/flat_updater.h"
#include "engine/state_store.h"
#include "tranche/comm/communicator.h"
#include "tranche/device/step_arena.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// The plan is a function of layouts and groups. A matrix is computed once in the group that shares its state
/// out: that of the shards, in each replica, or with Replicate::parameters all ranks of a stage. Where every
/// rank keeps all of the state (stage 0) the owner has the matrix already, and the result goes to all.
class WholeMatrices {
 public:
  /// All arguments outlive it. `ranks` are those whose gradients make the step of this stage of a pipeline,
  /// or of the model; `in_mesh` has their numbers in the mesh. Throws ConfigurationError for a matrix that
  /// stages share where its state is sharded over replicas too.
  WholeMatrices(StateStore& store, const Config& config, FlatUpdater& updater, const Optimizer& optimizer,
                Communicator& ranks, std::vector<int> in_mesh, const Mesh& mesh, Device& device,
                StepArena& arena);

  bool any() const { return !exchanges_.empty(); }
  /// Takes host memory for state that lives there or on disk.
  void allocate(MemoryResource& host_memory);
  /// Updates their flat buffers and begins to gather the new weights; a skipped step sends the same messages.
  /// Three buffers are under way at a time, so that messages pass behind the products of others. State on the
  /// nvme tier is read and written twice, before its message and behind it.
  void update(const OptimizerStep& step);

  /// Elements and bytes that this rank sends in a step.
  TrafficCount sent() const;
  /// The greatest load of a rank of this one's group over the mean.
  double load_ratio() const { return load_ratio_; }

 private:
  /// Elements of one tensor, in order, and their place in the message.
  struct Piece {
    ElementRange range;  ///< of the flat buffer
    std::int64_t offset = 0;
  };
  struct Matrix {
    int tensor = 0;  ///< of the engine
    std::int64_t offset = 0, elements = 0;
  };
  struct Exchange {
    FlatBuffer* flat = nullptr;
    Communicator* group = nullptr;
    bool everywhere = false;             ///< every rank keeps all of the state
    std::vector<Piece> pieces;           ///< of what this rank keeps, by the owner of their matrix
    std::vector<Matrix> owned;           ///< in the buffer's order
    std::vector<RankElements> messages;  ///< by rank: this rank's pieces of its matrices
    std::vector<RankElements> matrices;  ///< by rank: its pieces of this rank's matrices
    std::int64_t message_elements = 0, owned_elements = 0, largest_piece = 0, scratch_bytes = 0;
  };
  /// The messages and matrices of a buffer whose update is under way.
  struct Flight {
    StepBuffer message, matrices;
    void* host_message = nullptr;
    Event arrived;
    std::vector<Event> returned;
  };

  ElementRange brought_by(const Exchange& exchange, int rank) const;
  void plan(Communicator& group);
  template <class Visit>
  static void for_each_piece(const Exchange& exchange, const ShardSlice& slice, void* message,
                             const Visit& visit);
  StepBuffer acquire(std::int64_t bytes, Category category, std::string_view tag);
  void begin(Exchange& exchange, Flight& flight, const OptimizerStep& step);
  void compute(Exchange& exchange, Flight& flight, const OptimizerStep& step);
  void finish(Exchange& exchange, Flight& flight, const OptimizerStep& step);

  StateStore& store_;
  const Config& config_;
  FlatUpdater& updater_;
  const Optimizer& optimizer_;
  Communicator& ranks_;
  std::vector<int> in_mesh_;
  const Mesh& mesh_;
  StepArena& arena_;
  Stream& compute_;
  std::vector<Exchange> exchanges_;
  double load_ratio_ = 1;
  std::vector<Buffer> host_messages_;  ///< one for each buffer under way
  Buffer host_scratch_;
  bool passed_ = false;  ///< the arena has seen a pass
};

}  // namespace tranche::detail
