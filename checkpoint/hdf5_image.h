#pragma once
/// HDF5 files made in memory: the library lays them out, our own I/O writes them. Nothing here touches a
/// disk, and no payload is held: a shard's image is its metadata and the places where its datasets will lie.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/format.h"

namespace tranche::checkpoint {

/// A file of `bytes` bytes of which only some ranges have been written; the rest is zero or payload to
/// come.
struct SparseImage {
  static constexpr std::int64_t page_bytes = 4096;
  std::int64_t bytes = 0;                                ///< a multiple of 4096
  std::map<std::int64_t, std::vector<std::byte>> pages;  ///< first byte -> 4096 bytes
  /// Copies what has been written in [begin, begin + size) over `target` and leaves the rest of it alone.
  void overlay(std::int64_t begin, std::byte* target, std::int64_t size) const;
};

/// Smaller datasets would not be aligned.
inline constexpr std::int64_t least_aligned_bytes = 512;
/// Elements of a shard's dataset that holds so many bytes; zero behind them.
constexpr std::int64_t dataset_extent(std::int64_t bytes, DataType dtype) {
  return std::max(bytes, least_aligned_bytes) / size_of(dtype);
}

struct ShardImage {
  SparseImage file;
  std::vector<std::int64_t> offsets;        ///< byte of each section's dataset; -1: none
  std::vector<std::int64_t> array_offsets;  ///< likewise of each array's
  std::int64_t table_offset = 0;  ///< byte of the dataset "digests": one per leaf before it; last in the file
  std::int64_t leaves = 0;
};

/// The empty file of one rank: contiguous datasets aligned to 4096 bytes, one for each section with elements
/// here, one for each array with elements here (each of 512 bytes at least, behind its elements zero), and
/// then "digests"; attributes of the root group say what it is. Throws CheckpointError.
ShardImage make_shard_image(const Layout& layout, int rank, std::int64_t step);

/// model.h5: every weight ("weights/NAME") and optimizer state ("state/KIND/NAME") as a virtual dataset of
/// its tensor's shape over the shards beside it; NaN where a shard is missing. Aliases are soft links. A
/// tensor without extents is shown as [1]. What is stored in blocks with a meaning of their own is not shown.
/// Throws CheckpointError.
std::vector<std::byte> make_master_image(const Layout& layout, const std::vector<ShardRecord>& shards);

}  // namespace tranche::checkpoint
