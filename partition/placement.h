#pragma once
/// The one answer to where each tensor of a model lies: in which flat buffer, which ranks share that buffer,
/// and which elements of it each rank owns. Every other part reads this and computes none of it again.
/// Integers only; no communication.

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

/// The facts of a tensor that decide where it lies.
struct TensorFacts {
  Shape shape;
  int unit = 0;
  bool frozen = false;
  int state_class = 0;  ///< trainable tensors of one class share a buffer; 0 for frozen tensors
  /// Coordinates on the axis `pipeline` whose ranks hold the tensor, ascending: several for a tensor that is
  /// tied over stages. Empty: the first.
  std::vector<int> stages = {};
  /// Uses of its unit that read the tensor, ascending, where the gradients of each use are told apart:
  /// tensors of different uses are in different buffers then. Empty: they are not told apart.
  std::vector<int> uses = {};
  /// How ranks that differ on the axis `tensor` divide it; whole: each has all of it.
  TensorCut cut = {};
};

/// A pure function of the mesh, the model's tensors and the classes of optimizer state, so that each rank
/// knows the place of every tensor on every rank.
///
/// Tensors are numbered over all units, in declared order. Buffers are numbered over all units too. A unit's
/// tensors are divided by the uses that read them, the stages that hold them and the ranks of the axis
/// `tensor` that hold equal values of them, in order of first appearance; for each such set the unit has one
/// buffer for each state class and one for frozen tensors behind them. Buffers without tensors keep their
/// number.
///
/// A buffer belongs to the group of ranks that hold equal values of its tensors. It is sharded over that
/// group, and each of the group's replicas owns an equal part of each shard. Where the axis `tensor` cuts the
/// tensors, the buffer consists of parts: each group has a part of its own, of other sizes than the next
/// one's where a dimension does not divide.
class Placement {
 public:
  struct Buffer {
    int unit = 0;
    bool frozen = false;
    int state_class = 0;
    std::vector<int> stages;          ///< that hold it
    std::vector<int> uses;            ///< that read its tensors, if they are told apart
    int sharers = 1;                  ///< neighbouring ranks of the axis `tensor` that hold equal values
    std::vector<int> tensors;         ///< by their number in the layout
    std::vector<FlatLayout> layouts;  ///< of each part
    bool empty() const { return tensors.empty(); }
    int parts() const { return static_cast<int>(layouts.size()); }
    const FlatLayout& layout(int part) const { return layouts.at(static_cast<std::size_t>(part)); }
    /// Elements of all parts with their padding.
    std::int64_t padded_elements() const;
  };

  /// `block_classes` says of each state class whether its states are stored in blocks. Throws InvalidArgument
  /// when a tensor names a unit, a class or a stage that does not exist, units do not ascend, a tensor cannot
  /// be cut as it says, or FlatLayout refuses the sizes.
  Placement(const Mesh& mesh, int units, std::vector<TensorFacts> tensors,
            const std::vector<bool>& block_classes);

  const Mesh& mesh() const { return mesh_; }
  int state_classes() const { return classes_; }
  int units() const { return static_cast<int>(first_buffer_.size()) - 1; }
  int tensors() const { return static_cast<int>(tensors_.size()); }
  const TensorFacts& tensor(int tensor) const { return tensors_.at(static_cast<std::size_t>(tensor)); }
  /// Number of the buffer that holds the tensor.
  int buffer_of(int tensor) const { return places_.at(static_cast<std::size_t>(tensor)).buffer; }
  /// Number of the tensor in the layout of its buffer.
  int index_in_buffer(int tensor) const { return places_.at(static_cast<std::size_t>(tensor)).index; }
  /// The elements of the tensor that a part of its buffer holds.
  Box box(int tensor, int part) const;

  const std::vector<Buffer>& buffers() const { return buffers_; }
  const Buffer& buffer(int number) const { return buffers_.at(static_cast<std::size_t>(number)); }
  /// Number of a unit's first buffer; that of the unit behind the last is the number of all buffers.
  int first_buffer(int unit) const { return first_buffer_.at(static_cast<std::size_t>(unit)); }
  std::span<const Buffer> buffers_of_unit(int unit) const;

  // The ranks that share a buffer. Ranks are those of the mesh. All but holds() and class_of() throw
  // InvalidArgument for a rank that does not hold the buffer.
  bool holds(int buffer, int rank) const;
  /// The part of the buffer that `rank` has a shard of, whether its stage holds the buffer or not.
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
  /// Elements of the buffer in the shard that `rank` holds.
  ElementRange shard(int buffer, int rank) const;
  /// Elements of that shard that `rank` alone among its replicas counts in norms and digests and stores in
  /// checkpoints. These ranges of all ranks that hold a part of the buffer cover the part once.
  ElementRange owned(int buffer, int rank) const;
  /// All ranks that hold a part of the buffer, in the order of the ranges that they own.
  std::vector<int> owners(int buffer, int part = 0) const;

  /// Elements of all buffers with their padding, as one copy of the model's state has them.
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
  std::vector<int> first_buffer_;  ///< by unit, and one behind the last
};

/// The part of a shard that one of `replicas` equal owners has, of which this is number `replica`.
ElementRange owned_part(ElementRange shard, int replica, int replicas);

}  // namespace tranche::detail
