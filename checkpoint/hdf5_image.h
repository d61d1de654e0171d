#pragma once
/// HDF5 files built in memory: the library lays them out, our own I/O writes them. Nothing here accesses a
/// disk, and no payload is held: a shard's image contains its metadata and the offsets of its datasets.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/format.h"

namespace tranche::checkpoint {

/// A file of `bytes` bytes of which only some ranges have been written; the rest is zero or future payload.
struct SparseImage {
  static constexpr std::int64_t page_bytes = 4096;
  std::int64_t bytes = 0;                                ///< a multiple of 4096
  std::map<std::int64_t, std::vector<std::byte>> pages;  ///< first byte -> 4096 bytes
  /// Copies the written parts of [begin, begin + size) to `target` and leaves its other bytes unchanged.
  void overlay(std::int64_t begin, std::byte* target, std::int64_t size) const;
};

/// Smaller datasets would not be aligned.
inline constexpr std::int64_t least_aligned_bytes = 512;
/// The number of elements of a shard's dataset that holds so many bytes; it is padded with zeros to the least
/// size.
constexpr std::int64_t dataset_extent(std::int64_t bytes, DataType dtype) {
  return std::max(bytes, least_aligned_bytes) / size_of(dtype);
}

struct ShardImage {
  SparseImage file;
  std::vector<std::int64_t> offsets;        ///< byte offset of each section's dataset; -1: none
  std::vector<std::int64_t> array_offsets;  ///< byte offset of each array's dataset; -1: none
  std::int64_t table_offset = 0;            ///< byte offset of the last dataset, "digests"
  std::int64_t leaves = 0;
};

/// The empty file of one rank: contiguous datasets aligned to 4096 bytes, one for each section and each array
/// with elements here (each of at least 512 bytes, padded with zeros), and then "digests"; attributes of the
/// root group describe it. Throws CheckpointError.
ShardImage make_shard_image(const Layout& layout, int rank, std::int64_t step);

/// A checkpoint's model.h5.
struct MasterImage {
  std::vector<std::byte> bytes;
  std::string hdf5;  ///< the version of the library that made it
};

/// Makes model.h5: every weight ("weights/NAME") and optimizer state ("state/KIND/NAME") as a virtual dataset
/// of its tensor's shape over the shards beside it; NaN where a shard is missing. Aliases are soft links. A
/// tensor without extents has the shape [1]. Data in block formats is left out. Throws CheckpointError.
MasterImage make_master_image(const Layout& layout);

}  // namespace tranche::checkpoint
