#pragma once
/// Integer arithmetic of flat buffers: the offset of each tensor, and the range that each rank owns. It needs
/// no device and no communication.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tranche::detail {

/// Constants of the format (checkpoints depend on them).
inline constexpr std::int64_t tensor_alignment_elements = 64;
inline constexpr std::int64_t shard_multiple_elements = 256;
/// Alignment if states are stored in blocks, so that no block spans two tensors or two shards.
inline constexpr std::int64_t block_alignment_elements = 256;

/// Elements [begin, end).
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const noexcept { return end > begin ? end - begin : 0; }
  bool empty() const noexcept { return end <= begin; }
  friend bool operator==(const ElementRange&, const ElementRange&) = default;
};
/// The intersection of both ranges; empty when they are disjoint.
ElementRange intersect(ElementRange a, ElementRange b);

/// The part of one tensor within a range of the flat buffer.
struct TensorPiece {
  int tensor = 0;                 ///< index in the layout
  std::int64_t tensor_begin = 0;  ///< first element within the tensor
  std::int64_t buffer_begin = 0;  ///< first element within the flat buffer
  std::int64_t elements = 0;
  friend bool operator==(const TensorPiece&, const TensorPiece&) = default;
};

/// Layout of one flat buffer. Tensors are in declared order, each starting on a multiple of `alignment`
/// elements (64 or 256); otherwise there is padding only at the end. The buffer is divided into `ranks` equal
/// shards. A shard can be divided into `parts` of a multiple of 256 elements each, which equal the shards of
/// a layout over ranks * parts.
///
/// Example: tensors of 10 and 300 elements over 3 ranks start at 0 and 64, end at 364; shards hold 256
/// elements, so the buffer has 768: rank 0 owns [0, 256), rank 1 [256, 512), rank 2 owns only padding.
class FlatLayout {
 public:
  /// `tensor_elements` may be empty; then every size is 0. Throws InvalidArgument when ranks or parts are
  /// below 1, a tensor has no elements, or the buffer could exceed 2^63 bytes with 8-byte elements.
  FlatLayout(std::span<const std::int64_t> tensor_elements, int ranks, int parts = 1,
             std::int64_t alignment = tensor_alignment_elements);

  int ranks() const noexcept { return static_cast<int>(ranks_); }
  int tensors() const noexcept { return static_cast<int>(sizes_.size()); }
  /// First element of a tensor in the buffer, the same for every number of ranks. This and the next function
  /// throw InvalidArgument when there is no such tensor.
  std::int64_t tensor_offset(int tensor) const;
  /// The tensor's elements, without padding.
  std::int64_t tensor_elements(int tensor) const;
  /// Sum of the tensors' elements, without padding.
  std::int64_t elements() const noexcept { return elements_; }
  /// Elements of the whole buffer: ranks * shard_elements.
  std::int64_t padded_elements() const noexcept { return shard_ * ranks_; }
  /// Elements of one shard.
  std::int64_t shard_elements() const noexcept { return shard_; }
  /// Range of the flat buffer that `rank` owns, padding included. Throws InvalidArgument when there is no
  /// such rank, like all functions with a rank.
  ElementRange shard_range(int rank) const;
  /// Elements of `rank`'s shard that belong to tensors (not padding).
  std::int64_t owned_elements(int rank) const;
  /// The parts of tensors within `range`, in order, one for each tensor that overlaps it; padding is skipped.
  /// Throws InvalidArgument when a non-empty range is not inside the buffer.
  std::vector<TensorPiece> pieces(ElementRange range) const;
  /// The parts of tensors within `rank`'s shard.
  std::vector<TensorPiece> shard_pieces(int rank) const { return pieces(shard_range(rank)); }
  /// Tensor and element within it at position `buffer_element`, as a part of one element; for padding, a part
  /// of no elements with tensor -1. Throws InvalidArgument outside the buffer.
  TensorPiece locate(std::int64_t buffer_element) const;

 private:
  void require_tensor(int tensor) const;
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> offsets_;
  std::int64_t elements_ = 0;
  std::int64_t shard_ = 0;
  std::int64_t ranks_ = 1;
};

/// One range to copy when a buffer is read with another number of ranks than it was written with.
struct OverlapPiece {
  int source_rank = 0;
  std::int64_t source_begin = 0;       ///< within the source rank's shard
  std::int64_t destination_begin = 0;  ///< within the destination rank's shard
  std::int64_t elements = 0;
  friend bool operator==(const OverlapPiece&, const OverlapPiece&) = default;
};
/// The ranges that `destination_rank` of `to` reads from the shards of `from`; both must have the same
/// tensors. Padding is never read. The ranges are in the order of both buffers; a range that is contiguous in
/// both is returned once, even over several tensors. Throws InvalidArgument when the tensors differ.
std::vector<OverlapPiece> overlaps(const FlatLayout& from, const FlatLayout& to, int destination_rank);

/// Divides a shard into ranges, relative to its begin. `bucket_elements` counts the shards of all ranks
/// together: a range has bucket_elements / ranks elements, rounded down to a multiple of
/// `shard_multiple_elements` but at least that many; the last may have fewer. Throws InvalidArgument when
/// bucket_elements < 1.
std::vector<ElementRange> bucket_ranges(const FlatLayout& layout, std::int64_t bucket_elements);

}  // namespace tranche::detail
