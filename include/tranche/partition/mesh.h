#pragma once
/// The process mesh: ranks as points of a product of named axes. It only computes integers and does not
/// communicate.

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace tranche {

/// replicate: copies of the model's state (hybrid sharding). pipeline: parts of the layers. shard: the ranks
/// of ZeRO. context: parts of a sequence. tensor: parts of a layer.
enum class MeshAxis : std::uint8_t { replicate, pipeline, shard, context, tensor };
inline constexpr int mesh_axes = 5;
std::string_view name_of(MeshAxis axis);

class Mesh {
 public:
  /// All ranks on the axis `shard`. Throws InvalidArgument when ranks < 1.
  explicit Mesh(int ranks);
  /// Reads axes with their sizes, such as "replicate=2, shard=*", slowest first: ranks that differ only in
  /// the last one are neighbours. One size may be `*`, which is computed from the others; an axis that is not
  /// named has size 1. Empty text means "shard=*". Throws ConfigurationError for an unknown axis (with the
  /// closest), an axis named twice, a second `*`, a size below 1, and sizes whose product is not `ranks`.
  static Mesh parse(std::string_view text, int ranks);

  int ranks() const { return ranks_; }
  int size(MeshAxis axis) const { return sizes_[index(axis)]; }
  /// Position of `rank` on the axis, from 0. Throws InvalidArgument when there is no such rank, as do all
  /// functions with a rank.
  int coordinate(MeshAxis axis, int rank) const;
  /// The ranks that differ from `rank` only in these axes, ascending. Every sum over them is taken in this
  /// order.
  std::vector<int> group(std::initializer_list<MeshAxis> axes, int rank) const;
  /// The number of ranks with different samples of a batch: replicate x shard. Batches, samplers, reduction
  /// orders and schedules use it instead of the number of all ranks.
  int data_ranks() const { return size(MeshAxis::replicate) * size(MeshAxis::shard); }
  /// The number of `rank` among the data ranks: its position in the ascending ranks that differ from it only
  /// in replicate and shard. Ranks that see the same samples have the same number.
  int data_rank(int rank) const;
  /// The number of ranks that compute different tokens: replicate x shard x context. The prompts of a
  /// generation, which are not cut, are divided among them.
  int token_ranks() const { return size(MeshAxis::replicate) * state_ranks(); }
  /// The number of `rank` among them, counted like data_rank().
  int token_rank(int rank) const;
  /// The number of ranks over which state is sharded and gradients are summed: shard x context. They see
  /// different tokens and compute the same part of the model.
  int state_ranks() const { return size(MeshAxis::shard) * size(MeshAxis::context); }
  /// The number of `rank` among them: its position in the ascending ranks that differ from it only in shard
  /// and context.
  int state_rank(int rank) const;
  /// The axes above 1 in their order, such as "replicate=2, shard=4"; "shard=1" for one rank.
  std::string to_string() const;
  /// The coordinates of a rank on the axes above 1, such as "replicate 1, shard 3"; empty if there is at most
  /// one such axis, because the rank alone then identifies it.
  std::string describe(int rank) const;
  /// "rank 5 (replicate 1, shard 1)", or "rank 5" if describe() is empty.
  std::string name_of_rank(int rank) const;
  friend bool operator==(const Mesh&, const Mesh&) = default;

 private:
  static std::size_t index(MeshAxis axis) { return static_cast<std::size_t>(axis); }
  void require_rank(int rank) const;

  int ranks_ = 1;
  std::array<int, mesh_axes> sizes_{1, 1, 1, 1, 1};
  /// The distance in ranks between neighbouring coordinates of an axis.
  std::array<int, mesh_axes> strides_{1, 1, 1, 1, 1};
  std::vector<MeshAxis> order_;  ///< axes above 1, slowest first
};

}  // namespace tranche
