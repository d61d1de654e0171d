#include "tranche/core/random.h"

#include <cmath>
#include <numbers>
#include <string>
#include <utility>

#include "core/philox.h"
#include "tranche/core/error.h"

namespace tranche {

namespace {

constexpr std::uint64_t block_bits = 56;
static_assert(random_stream_length == std::uint64_t{4} << block_bits);

void refuse_block(std::uint64_t block) {
  throw InvalidArgument(
      "random number stream asked for block " + std::to_string(block) +
      " of four; a stream has 2^56 blocks (2^58 draws), so part the work by the key's subject");
}

void refuse_purpose(std::uint32_t purpose) {
  throw InvalidArgument("random number purpose " + std::to_string(purpose) + " does not fit 8 bits");
}

/// Both normals of the pair of words (a, b). a is moved to (0, 1] so that the logarithm is finite.
std::pair<float, float> box_muller(std::uint32_t a, std::uint32_t b) {
  const double radius = std::sqrt(-2.0 * std::log((static_cast<double>(a) + 1.0) * 0x1p-32));
  const double angle = 2.0 * std::numbers::pi * (static_cast<double>(b) * 0x1p-32);
  return {static_cast<float>(radius * std::cos(angle)), static_cast<float>(radius * std::sin(angle))};
}

}  // namespace

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                        std::array<std::uint32_t, 2> key) {
  return detail::philox_rounds(counter, key);
}

std::array<std::uint32_t, 4> random_block(const RandomKey& key, std::uint64_t block) {
  const auto purpose = static_cast<std::uint32_t>(key.purpose);
  if (block >> block_bits != 0) refuse_block(block);
  if (purpose > 0xffu) refuse_purpose(purpose);
  return detail::unchecked_random_block(key, block);
}

std::uint32_t random_bits(const RandomKey& key, std::uint64_t index) {
  return random_block(key, index / 4)[index % 4];
}

float random_uniform(const RandomKey& key, std::uint64_t index) {
  return detail::uniform_of(random_bits(key, index));
}

float random_normal(const RandomKey& key, std::uint64_t index) {
  const auto words = random_block(key, index / 4);
  const std::size_t first = index % 4 & 2u;
  const auto pair = box_muller(words[first], words[first + 1]);
  return index % 2 == 0 ? pair.first : pair.second;
}

std::array<float, 4> random_normal_block(const RandomKey& key, std::uint64_t block) {
  const auto words = random_block(key, block);
  const auto low = box_muller(words[0], words[1]);
  const auto high = box_muller(words[2], words[3]);
  return {low.first, low.second, high.first, high.second};
}

}  // namespace tranche
