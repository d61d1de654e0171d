#pragma once
/// Counter-based random numbers: a draw is a pure function of its key and index, so any rank can compute any
/// element of any tensor without state. Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
/// 1, 2, 3", SC 2011).

#include <array>
#include <cstdint>

namespace tranche {

/// The purpose of a stream of numbers; draws with different purposes never share a counter. Values fit 8
/// bits.
enum class RandomPurpose : std::uint32_t {
  initialization = 1,
  dropout = 2,
  sampling = 3,
  shuffling = 4,
  test = 5,
  rounding = 6
};

/// Key of a stream of numbers: a 64-bit seed, a purpose, and a 64-bit subject (tensor index, dropout site
/// ...).
///
/// A draw is word `index % 4` of the Philox block with key = seed and the 128-bit counter subject << 64 |
/// purpose << 56 | index / 4. Nothing is hashed or truncated, so streams of different keys never meet. The
/// price is a bound: a stream has 2^58 draws, and the functions below throw InvalidArgument beyond it.
struct RandomKey {
  std::uint64_t seed = 0;
  RandomPurpose purpose = RandomPurpose::test;
  std::uint64_t subject = 0;
};

/// The number of draws in one stream.
inline constexpr std::uint64_t random_stream_length = std::uint64_t{1} << 58;

/// The raw Philox4x32-10 block function; known-answer tested against the published vectors.
std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                        std::array<std::uint32_t, 2> key);

/// 32 uniform bits for element `index` of the stream.
std::uint32_t random_bits(const RandomKey& key, std::uint64_t index);
/// Four consecutive draws, elements 4*block .. 4*block+3 of random_bits; for filling loops.
std::array<std::uint32_t, 4> random_block(const RandomKey& key, std::uint64_t block);
/// Uniform in [0, 1), a multiple of 2^-24.
float random_uniform(const RandomKey& key, std::uint64_t index);
/// A standard normal number, computed in double and rounded to fp32: elements 2i and 2i + 1 are the two
/// numbers that Box-Muller computes from draws 2i and 2i + 1. No magnitude exceeds 6.67 = sqrt(2 ln 2^32).
float random_normal(const RandomKey& key, std::uint64_t index);
/// Elements 4*block .. 4*block+3 of random_normal, at about a quarter of its cost; for filling loops.
std::array<float, 4> random_normal_block(const RandomKey& key, std::uint64_t block);

}  // namespace tranche
