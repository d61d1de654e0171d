#pragma once
/// The random number generator of scripts/exact_sums.py.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tests/core/exact_sums.h"

namespace tranche {

inline std::vector<std::uint64_t> drawn_states(const ExactCase& drawn) {
  std::vector<std::uint64_t> states;
  std::uint64_t state = drawn.seed;
  for (int i = 0; i < drawn.count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    states.push_back(state);
  }
  return states;
}

inline std::vector<float> drawn_floats(const ExactCase& drawn) {
  const std::string_view kind = drawn.kind;
  std::vector<float> numbers;
  for (const std::uint64_t state : drawn_states(drawn)) {
    const auto bits = static_cast<std::uint32_t>(state >> 32);
    std::uint32_t exponent = (bits >> 23) & 0xffu, mantissa = bits & 0x7fffffu;
    if (kind == "gradients") exponent = 100 + exponent % 24;
    if (kind == "subnormal") exponent = 0;
    if (kind == "largest") exponent = 254;
    if (kind == "zeros" && exponent % 2 != 0) exponent = mantissa = 0;
    exponent = std::min(exponent, 254u);
    numbers.push_back(std::bit_cast<float>((bits & 0x80000000u) | exponent << 23 | mantissa));
  }
  return numbers;
}

inline std::vector<double> drawn_doubles(const ExactCase& drawn) {
  std::vector<double> numbers;
  for (const std::uint64_t state : drawn_states(drawn)) {
    std::uint64_t sign = state >> 63 << 63, exponent = (state >> 52) & 0x7ffu;
    if (std::string_view(drawn.kind) == "losses") {
      sign = 0;
      exponent = 1023 + exponent % 16;
    }
    exponent = std::min<std::uint64_t>(exponent, 2000);
    numbers.push_back(std::bit_cast<double>(sign | exponent << 52 | (state & 0xfffffffffffffu)));
  }
  return numbers;
}

}  // namespace tranche
