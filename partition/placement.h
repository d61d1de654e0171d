#pragma once
/// The location of each tensor of a model: its flat buffer, the ranks that share that buffer, and the
/// elements that each rank owns. All other parts of Tranche use this class and do not compute it themselves.
/// Integers only; no communication.
///
/// Note: the choice of a buffer's group. Three properties of a tensor decide which ranks hold equal values of
/// it, and so over which ranks its state is sharded and its gradients are summed:
///
///     stages    the pipeline stages that read it (several if it is tied over stages)
///     sharers   the neighbouring ranks of the axis `tensor` with equal values: all of them if it is whole,
///               1 if it is cut, more if several ranks share a key/value head
///     uses      only with sums by use: the uses of its unit that read it
///
/// Tensors of a unit that agree in all three are in one buffer (two if some are frozen, one more for each
/// further class of optimizer state). The buffer's group has, for one replica and one part, shard x context x
/// stages x sharers ranks, in this order:
///
///     shard number = (Mesh::state_rank() * stages + stage) * sharers + coordinate on `tensor` mod sharers
///
/// engine/data_groups.h has the communicator of each group; state, reductions and checkpoints take the group
/// from here.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "partition/box.h"
#include "partition/flat_layout.h"
#include "partition/slices.h"
#include "tranche/core/shape.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// The properties of a tensor that determine its location.
struct TensorFacts {
  Shape shape;
  int unit = 0;
  bool frozen = false;
  int state_class = 0;  ///< trainable tensors of one class share a buffer; 0 for frozen tensors
  /// Coordinates on the axis `pipeline` whose ranks hold the tensor, ascending: several for a tensor that is
  /// tied over stages. Empty: only the first stage.
  std::vector<int> stages = {};
  /// Uses of its unit that read the tensor, ascending, if the gradients of each use are kept separate:
  /// tensors of different uses are then in different buffers. Empty: they are not separate.
  std::vector<int> uses = {};
  /// How ranks of the axis `tensor` divide it; if whole, each has all of it.
  TensorCut cut = {};
};

/// A pure function of the mesh, the model's tensors and the classes of optimizer state, so that each rank
/// knows the location of every tensor on every rank.
///
/// Tensors are numbered over all units, in declared order. Buffers are numbered over all units too. A unit's
/// tensors are divided by the uses that read them, the stages that hold them and the ranks of the axis
/// `tensor` with equal values of them, in order of first appearance. For each such set the unit has one
/// buffer for each state class, followed by one for frozen tensors. Empty buffers keep their number.
///
/// A buffer belongs to the group of ranks that hold equal values of its tensors. It is sharded over that
/// group, and each of the group's replicas owns an equal part of each shard. If the axis `tensor` cuts the
/// tensors, the buffer consists of parts, one for each group; their sizes may differ if a dimension is not
/// divisible.
class Placement {
 public:
  struct Buffer {
    int unit = 0;
    bool frozen = false;
    int state_class = 0;
    std::vector<int> stages;   ///< the stages that hold it
    std::vector<int> uses;     ///< the uses that read its tensors, if they are separate
    int sharers = 1;           ///< the number of neighbouring ranks of the axis `tensor` with equal values
    std::vector<int> tensors;  ///< tensor numbers, in the order of the layout
    std::vector<FlatLayout> layouts;  ///< one for each part
    bool empty() const { return tensors.empty(); }
    int parts() const { return static_cast<int>(layouts.size()); }
    const FlatLayout& layout(int part) const { return layouts.at(static_cast<std::size_t>(part)); }
    /// Elements of all parts, including padding.
    std::int64_t padded_elements() const;
  };

  /// `block_classes` has an entry for each state class: true if its states are stored in blocks. Throws
  /// InvalidArgument when a tensor names a unit, a class or a stage that does not exist, units do not ascend,
  /// a tensor cannot be cut as requested, or FlatLayout refuses the sizes.
  Placement(const Mesh& mesh, int units, std::vector<TensorFacts> tensors,
            const std::vector<bool>& block_classes);

  const Mesh& mesh() const { return mesh_; }
  int state_classes() const { return classes_; }
  int units() const { return static_cast<int>(first_buffer_.size()) - 1; }
  int tensors() const { return static_cast<int>(tensors_.size()); }
  const TensorFacts& tensor(int tensor) const { return tensors_.at(static_cast<std::size_t>(tensor)); }
  /// Number of the buffer with this tensor.
  int buffer_of(int tensor) const { return places_.at(static_cast<std::size_t>(tensor)).buffer; }
  /// Number of the tensor in its buffer's layout.
  int index_in_buffer(int tensor) const { return places_.at(static_cast<std::size_t>(tensor)).index; }
  /// The elements of the tensor in a part of its buffer.
  Box box(int tensor, int part) const;

  const std::vector<Buffer>& buffers() const { return buffers_; }
  const Buffer& buffer(int number) const { return buffers_.at(static_cast<std::size_t>(number)); }
  /// Number of a unit's first buffer; for `unit` = units(), the number of all buffers.
  int first_buffer(int unit) const { return first_buffer_.at(static_cast<std::size_t>(unit)); }
  std::span<const Buffer> buffers_of_unit(int unit) const;

  // Functions for the ranks that share a buffer. Ranks are those of the mesh. All except holds() and
  // class_of() throw InvalidArgument for a rank that does not hold the buffer.
  bool holds(int buffer, int rank) const;
  /// The part of the buffer of which `rank` has a shard; also valid if its stage does not hold the buffer.
  int part_of(int buffer, int rank) const;
  const FlatLayout& layout(int buffer, int rank) const {
    return this->buffer(buffer).layout(part_of(buffer, rank));
  }
  /// The lowest rank that holds the same buffers as `rank`.
  int class_of(int rank) const;
  /// Ranks over which the rank's part of the buffer is sharded, in the order of their shards and of sums over
  /// them: by Mesh::state_rank(), then by stage, and within a stage by coordinate on `tensor`.
  std::vector<int> group(int buffer, int rank) const;
  /// Ranks that hold the same shard as `rank`, itself included, in the order of sums over them.
  std::vector<int> replicas(int buffer, int rank) const;
  /// The range of the buffer in `rank`'s shard.
  ElementRange shard(int buffer, int rank) const;
  /// The range of that shard that only `rank` among its replicas counts in norms and digests and stores in
  /// checkpoints. These ranges of all ranks that hold a part of the buffer cover the part once.
  ElementRange owned(int buffer, int rank) const;
  /// All ranks that hold a part of the buffer, in the order of the ranges that they own.
  std::vector<int> owners(int buffer, int part = 0) const;

  /// Elements of all buffers in one copy of the model's state, including padding.
  std::int64_t padded_elements() const;

 private:
  struct Place {
    int buffer = 0;
    int index = 0;
  };
  /// The number of a rank's shard.
  int shard_of(int buffer, int rank) const;

  Mesh mesh_;
  int classes_;
  std::vector<TensorFacts> tensors_;
  std::vector<Place> places_;
  std::vector<Buffer> buffers_;
  std::vector<int> first_buffer_;  ///< by unit, with one more entry at the end
};

/// The part of a shard that owner number `replica` of `replicas` equal owners has.
ElementRange owned_part(ElementRange shard, int replica, int replicas);

}  // namespace tranche::detail
