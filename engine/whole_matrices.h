#pragma once
/// The update of tensors that one rank each computes whole (Muon): shards of what the rule prepared go to the
/// owner of their matrix, and shards of what it makes of that come back. Private to engine/.

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/data_groups.h"
#include "engine/flat_updater.h"
#include "engine/state_store.h"
#include "partition/placement.h"
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

  bool any() const { return !exchanges_.empty(); }
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
  double load_ratio() const { return load_ratio_; }

 private:
  /// Elements of one tensor, in order, and their place in the message.
  struct Piece {
    ElementRange range;  ///< of the flat buffer
    std::int64_t offset = 0;
  };
  /// A part of a matrix, as the ranks that hold it send it to the owner.
  struct Part {
    std::int64_t offset = 0;  ///< among the matrices that the owner receives
    Box box;                  ///< its place in the matrix
  };
  struct Matrix {
    int tensor = 0;  ///< of the engine
    std::int64_t elements = 0;
    std::vector<Part> parts;  ///< one, which is all of it, unless the axis `tensor` cuts it
  };
  struct Exchange {
    FlatBuffer* flat = nullptr;
    int buffer = 0;  ///< of the placement
    Communicator* group = nullptr;
    std::vector<int> in_mesh;  ///< numbers in the mesh, by rank of the group
    MeshAxis axis = MeshAxis::shard;
    bool cut = false;                    ///< by the axis `tensor`: ranks of the group have different parts
    bool everywhere = false;             ///< every rank keeps all state of its part
    std::vector<Piece> pieces;           ///< of what this rank keeps, by the owner of their matrix
    std::vector<Matrix> owned;           ///< in the buffer's order
    std::vector<RankElements> messages;  ///< by rank: this rank's pieces of its matrices
    std::vector<RankElements> matrices;  ///< by rank: its pieces of this rank's matrices
    // The same on the way to the owners, where of ranks with equal pieces one alone sends.
    std::vector<RankElements> given, received;
    std::int64_t message_elements = 0, owned_elements = 0, largest_piece = 0, scratch_bytes = 0;
    std::int64_t largest_matrix = 0;  ///< elements of the largest that is put together of parts
  };
  /// The messages and matrices of a buffer whose update is under way.
  struct Flight {
    StepBuffer message, matrices;
    void* host_message = nullptr;
    Event arrived;
    std::vector<Event> returned;
  };

  int part_held_by(const Exchange& exchange, int rank) const;
  const FlatLayout& layout_of(const Exchange& exchange, int part) const;
  ElementRange brought_by(const Exchange& exchange, int rank) const;
  bool gives(const Exchange& exchange, int rank, int owner) const;
  void plan(Communicator& group);
  void plan_messages(Exchange& exchange, std::span<const int> owners);
  void plan_matrices_of(Exchange& exchange, std::span<const int> owners);
  template <class Visit>
  static void for_each_piece(const Exchange& exchange, const ShardSlice& slice, void* message,
                             const Visit& visit);
  StepBuffer acquire(std::int64_t bytes, Category category, std::string_view tag);
  void copy_part(const Matrix& matrix, const Part& part, void* whole, void* parts, bool back);
  void begin(Exchange& exchange, Flight& flight, const OptimizerStep& step);
  void compute(Exchange& exchange, Flight& flight, const OptimizerStep& step);
  void finish(Exchange& exchange, Flight& flight, const OptimizerStep& step);

  StateStore& store_;
  const Config& config_;
  FlatUpdater& updater_;
  const Optimizer& optimizer_;
  StepArena& arena_;
  Stream& compute_;
  std::vector<Exchange> exchanges_;
  double load_ratio_ = 1;
  std::vector<Buffer> host_messages_;  ///< one for each buffer under way
  Buffer host_scratch_;
  bool passed_ = false;  ///< the arena has seen a pass
};

}  // namespace tranche::detail
