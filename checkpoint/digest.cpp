#include "checkpoint/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>

namespace tranche::checkpoint {

static_assert(std::endian::native == std::endian::little,
              "files hold little-endian numbers as they lie in memory");

std::uint64_t digest_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::uint64_t digest_of(std::string_view text) {
  return XXH3_64bits(text.data(), text.size());
}

std::uint64_t block_digest(std::span<const std::uint64_t> leaves) {
  return digest_of(std::as_bytes(leaves));
}

void leaf_digests(std::span<const std::byte> bytes, std::uint64_t* leaves) {
  constexpr auto leaf = static_cast<std::size_t>(leaf_bytes);
  for (std::size_t at = 0; at < bytes.size(); at += leaf) {
    *leaves++ = digest_of(bytes.subspan(at, std::min(leaf, bytes.size() - at)));
  }
}

std::vector<std::uint64_t> block_digests(std::span<const std::byte> file) {
  constexpr auto block = static_cast<std::size_t>(block_bytes);
  std::vector<std::uint64_t> digests;
  std::vector<std::uint64_t> leaves;
  for (std::size_t at = 0; at < file.size(); at += block) {
    const auto part = file.subspan(at, std::min(block, file.size() - at));
    leaves.resize((part.size() + leaf_bytes - 1) / leaf_bytes);
    leaf_digests(part, leaves.data());
    digests.push_back(block_digest(leaves));
  }
  return digests;
}

std::string to_hex(std::uint64_t digest) {
  std::string text(16, '0');
  for (int digit = 15; digit >= 0; --digit, digest >>= 4) {
    text[static_cast<std::size_t>(digit)] = "0123456789abcdef"[digest & 15];
  }
  return text;
}

bool from_hex(std::string_view text, std::uint64_t& digest) {
  if (text.size() != 16) return false;
  digest = 0;
  for (const char c : text) {
    const bool decimal = c >= '0' && c <= '9';
    if (!decimal && (c < 'a' || c > 'f')) return false;
    digest = digest << 4 | static_cast<std::uint64_t>(decimal ? c - '0' : c - 'a' + 10);
  }
  return true;
}

}  // namespace tranche::checkpoint
