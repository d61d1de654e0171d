#pragma once
/// The position of every byte of one rank's file, known before anything is written.

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format.h"
#include "checkpoint/hdf5_image.h"

namespace tranche::checkpoint {

/// A range of one section of one flat buffer in a rank's file.
struct SectionPiece {
  int section = 0;
  int unit = 0;
  int buffer = 0;              ///< index in the unit
  int instance = 0;            ///< index in the buffer
  detail::ElementRange range;  ///< in the flat buffer
};

/// The plan of a rank's file. File sizes are the same on all ranks if their shards are equal.
class ShardPlan {
 public:
  /// Throws InvalidArgument when the rank does not exist, CheckpointError when HDF5 refuses to lay the file
  /// out.
  ShardPlan(const Layout& layout, int rank, std::int64_t step);

  const Layout& layout() const noexcept { return layout_; }
  int rank() const noexcept { return rank_; }
  std::string file_name() const { return shard_name(rank_, layout_.world); }
  std::int64_t file_bytes() const noexcept { return image_.file.bytes; }
  /// The bytes of all sections, including padding, and of arrays.
  std::int64_t payload_bytes() const noexcept { return payload_bytes_; }
  /// The byte offset of the table of leaf digests, which covers all bytes before it.
  std::int64_t table_offset() const noexcept { return image_.table_offset; }
  std::int64_t leaves() const noexcept { return image_.leaves; }
  const std::vector<std::int64_t>& offsets() const noexcept { return image_.offsets; }
  /// The byte offset of this rank's elements of each array; -1: it has none.
  const std::vector<std::int64_t>& array_offsets() const noexcept { return image_.array_offsets; }
  /// The bytes of this rank's elements of an array.
  std::int64_t array_bytes(int array) const;
  /// The byte ranges of the file that hold payload: sections, then arrays, ascending.
  const std::vector<detail::ElementRange>& payload() const noexcept { return payload_; }
  const SparseImage& image() const noexcept { return image_.file; }

  /// All pieces that this rank stores, in the order of the file.
  const std::vector<SectionPiece>& pieces() const noexcept { return pieces_; }
  /// The byte offset of a piece, or of a range of one. Throws InvalidArgument when this rank does not store
  /// it.
  std::int64_t offset_of(const SectionPiece& part) const;

 private:
  Layout layout_;
  int rank_;
  ShardImage image_;
  std::int64_t payload_bytes_ = 0;
  std::vector<detail::ElementRange> payload_;  ///< byte ranges of the file
  std::vector<SectionPiece> pieces_;
  std::vector<std::int64_t> offsets_;  ///< byte offset of each piece
};

}  // namespace tranche::checkpoint
