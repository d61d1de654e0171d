#pragma once
/// The deterministic reduction, implemented a second time from its definition for the tests; it shares no
/// code with the library.

#include <cstdint>
#include <vector>

namespace tranche::test {

/// Mixes the bits of a number (the finaliser of MurmurHash3).
inline std::uint32_t scramble(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<std::uint32_t>(x >> 32);
}

/// A value of widely varying magnitude, so that another order of addition changes bits.
inline float test_value(int rank, std::int64_t index, std::uint64_t salt) {
  const std::uint32_t bits = scramble(salt * 1000003 + static_cast<std::uint64_t>(rank) * 7919 +
                                      static_cast<std::uint64_t>(index) * 65537);
  const float mantissa = static_cast<float>(bits & 0xffffff) / 16777216.0f - 0.5f;
  return mantissa * static_cast<float>(1 << ((bits >> 24) % 12));
}

/// The sums of consecutive groups of terms, in fp32. For five terms in groups of three: (t0 + t1) + t2, and
/// t3 + t4.
inline std::vector<float> sums_of_groups(const std::vector<float>& terms, std::size_t group_size) {
  std::vector<float> groups;
  for (std::size_t r = 0; r < terms.size(); ++r) {
    if (r % group_size == 0) {
      groups.push_back(terms[r]);
    } else {
      groups.back() = groups.back() + terms[r];
    }
  }
  return groups;
}

}  // namespace tranche::test
