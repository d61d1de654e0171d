#pragma once
/// The block function of the counter-based random numbers and the positions of a stream's blocks, as
/// constexpr arithmetic that any device may run. The interface is core/random.h, which checks the arguments.

#include <array>
#include <cstdint>

#include "tranche/core/random.h"

namespace tranche::detail {

/// Philox4x32-10; see core/random.h.
constexpr std::array<std::uint32_t, 4> philox_rounds(std::array<std::uint32_t, 4> counter,
                                                     std::array<std::uint32_t, 2> key) {
  constexpr std::uint64_t multiplier_0 = 0xd2511f53u;
  constexpr std::uint64_t multiplier_1 = 0xcd9e8d57u;
  constexpr std::uint32_t weyl_0 = 0x9e3779b9u;
  constexpr std::uint32_t weyl_1 = 0xbb67ae85u;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product_0 = multiplier_0 * counter[0];
    const std::uint64_t product_1 = multiplier_1 * counter[2];
    counter = {static_cast<std::uint32_t>(product_1 >> 32) ^ counter[1] ^ key[0],
               static_cast<std::uint32_t>(product_1),
               static_cast<std::uint32_t>(product_0 >> 32) ^ counter[3] ^ key[1],
               static_cast<std::uint32_t>(product_0)};
    key[0] += weyl_0;
    key[1] += weyl_1;
  }
  return counter;
}

/// random_block without its checks: `block` is below 2^56 and the purpose below 2^8.
constexpr std::array<std::uint32_t, 4> unchecked_random_block(const RandomKey& key, std::uint64_t block) {
  return philox_rounds(
      {static_cast<std::uint32_t>(block),
       static_cast<std::uint32_t>(block >> 32) | static_cast<std::uint32_t>(key.purpose) << 24,
       static_cast<std::uint32_t>(key.subject), static_cast<std::uint32_t>(key.subject >> 32)},
      {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32)});
}

/// random_uniform of an element whose draw is `bits`.
constexpr float uniform_of(std::uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

}  // namespace tranche::detail
