#pragma once
/// The process mesh: ranks as points of a product of named axes. Integers only; no communication.

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace tranche {

/// replicate: copies of the model's state (hybrid sharding). pipeline: parts of the layers. shard: ZeRO's
/// ranks. context: parts of a sequence. tensor: parts of a layer.
enum class MeshAxis : std::uint8_t { replicate, pipeline, shard, context, tensor };
inline constexpr int mesh_axes = 5;
std::string_view name_of(MeshAxis axis);

class Mesh {
 public:
  /// All ranks on the axis `shard`. Throws InvalidArgument when ranks < 1.
  explicit Mesh(int ranks);
  /// "replicate=2, shard=*": axes with their sizes, slowest first: ranks that differ in the last one alone
  /// are neighbours. One size may be `*`, which takes what the others leave; an axis that is not named has
  /// size 1. Empty text is "shard=*". Throws ConfigurationError for an unknown axis (with the closest), an
  /// axis named twice, a second `*`, a size below 1, and sizes whose product is not `ranks`.
  static Mesh parse(std::string_view text, int ranks);

  int ranks() const { return ranks_; }
  int size(MeshAxis axis) const { return sizes_[index(axis)]; }
  /// Position of `rank` on the axis, from 0 on. Throws InvalidArgument when there is no such rank, as do all
  /// functions that take one.
  int coordinate(MeshAxis axis, int rank) const;
  /// Ranks that differ from `rank` in these axes alone, ascending; their order is that of every sum over
  /// them.
  std::vector<int> group(std::initializer_list<MeshAxis> axes, int rank) const;
  /// Ranks that see different samples of a batch: replicate x shard. Batches, samplers, reduction orders and
  /// schedules count these and never all ranks.
  int data_ranks() const { return size(MeshAxis::replicate) * size(MeshAxis::shard); }
  /// Number of `rank` among the data ranks: its position in the ascending ranks that differ from it in
  /// replicate and shard alone. Ranks that see the same samples have the same number.
  int data_rank(int rank) const;
  /// Ranks that compute different tokens: replicate x shard x context. Prompts of a generation, which are not
  /// cut, are shared out over these.
  int token_ranks() const { return size(MeshAxis::replicate) * state_ranks(); }
  /// Number of `rank` among them, by its position as data_rank() has it.
  int token_rank(int rank) const;
  /// Ranks over which state is sharded and gradients are added up: shard x context, whose ranks see different
  /// tokens and compute the same part of the model.
  int state_ranks() const { return size(MeshAxis::shard) * size(MeshAxis::context); }
  /// Number of `rank` among them: its position in the ascending ranks that differ from it in shard and
  /// context alone.
  int state_rank(int rank) const;
  /// "replicate=2, shard=4": axes above 1 in their order; "shard=1" for one rank.
  std::string to_string() const;
  /// "replicate 1, shard 3": the coordinates of a rank on the axes above 1; empty where there is one such
  /// axis at most, since the rank says it all.
  std::string describe(int rank) const;
  /// "rank 5 (replicate 1, shard 1)", or "rank 5" where describe() is empty.
  std::string name_of_rank(int rank) const;
  friend bool operator==(const Mesh&, const Mesh&) = default;

 private:
  static std::size_t index(MeshAxis axis) { return static_cast<std::size_t>(axis); }
  void require_rank(int rank) const;

  int ranks_ = 1;
  std::array<int, mesh_axes> sizes_{1, 1, 1, 1, 1};
  /// Ranks from one coordinate of an axis to the next.
  std::array<int, mesh_axes> strides_{1, 1, 1, 1, 1};
  std::vector<MeshAxis> order_;  ///< axes above 1, slowest first
};

}  // namespace tranche
