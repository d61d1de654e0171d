#pragma once
/// The contribution of one element to a digest.

#include <bit>
#include <cstdint>

#include "tranche/kernels/reduction.h"

namespace tranche::kernels {

/// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection in which every input bit
/// affects every output bit.
constexpr std::uint64_t mix64(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/// The initial values of a tensor's elements in the two words.
constexpr Digest digest_origin(std::uint64_t tensor) {
  return {{mix64(tensor + 0x9e3779b97f4a7c15u), mix64(tensor ^ 0x6a09e667f3bcc909u)}};
}

/// The element and its bits enter each word with different odd multipliers before they are mixed, so two
/// different (element, bits) that collide in one word do not collide in the other.
constexpr Digest digest_of(const Digest& origin, std::uint64_t element, float value) {
  std::uint64_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
  return {{mix64(origin.lanes[0] + element * 0x9e3779b97f4a7c15u + bits * 0xd6e8feb86659fd93u),
           mix64(origin.lanes[1] + element * 0xd1342543de82ef95u + bits * 0xa0761d6478bd642fu)}};
}

}  // namespace tranche::kernels
