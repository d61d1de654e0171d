#pragma once
/// Digests of files: XXH3-64 (seed 0) in two levels, so that small parts can be verified and the manifest
/// stays small. A *leaf* is 16 KiB, a *block* 4 MiB: 256 leaves; the last of each may be shorter. The digest
/// of a leaf is XXH3 of its bytes; the digest of a block is XXH3 of its leaves' digests, 8 bytes
/// little-endian each.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::checkpoint {

inline constexpr std::int64_t leaf_bytes = 16 * 1024;
inline constexpr std::int64_t block_bytes = 4 * 1024 * 1024;
inline constexpr std::int64_t leaves_per_block = block_bytes / leaf_bytes;

/// XXH3-64 with seed 0.
std::uint64_t digest_of(std::span<const std::byte> bytes);
std::uint64_t digest_of(std::string_view text);
/// The digest of a block, computed from those of its leaves.
std::uint64_t block_digest(std::span<const std::uint64_t> leaves);
/// Writes the digests of a range's leaves to `leaves` (one for each leaf, also a partial one). The range
/// starts at a leaf.
void leaf_digests(std::span<const std::byte> bytes, std::uint64_t* leaves);
/// The digests of all blocks of a file that is in memory.
std::vector<std::uint64_t> block_digests(std::span<const std::byte> file);

/// 16 hexadecimal digits, lower case.
std::string to_hex(std::uint64_t digest);
/// The inverse of to_hex; false when `text` is not such a text.
bool from_hex(std::string_view text, std::uint64_t& digest);

}  // namespace tranche::checkpoint
