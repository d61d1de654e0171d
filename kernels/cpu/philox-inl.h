// Many blocks at once of core's counter-based random numbers (core/philox.h). Included once per instruction
// set by sources that use foreach_target.h.
#if defined(TRANCHE_KERNELS_CPU_PHILOX_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TRANCHE_KERNELS_CPU_PHILOX_INL_H
#undef TRANCHE_KERNELS_CPU_PHILOX_INL_H
#else
#define TRANCHE_KERNELS_CPU_PHILOX_INL_H
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "tranche/core/random.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Calls store(draws, i) with vectors of 32-bit draws, in 64-bit lanes, that begin with draw i of `blocks`
/// blocks from first_block on, for as many whole vectors of blocks as there are; returns the number of blocks
/// done. A 64-bit lane holds a block, with each word of its counter in the lower half of a lane, where
/// multiplications take it; the upper halves are not read.
template <class Store>
HWY_INLINE std::int64_t for_random_blocks([[maybe_unused]] const RandomKey& key, std::uint64_t first_block,
                                          std::int64_t blocks, [[maybe_unused]] const Store& store) {
#if HWY_TARGET == HWY_SCALAR
  static_cast<void>(first_block + static_cast<std::uint64_t>(blocks));
  return 0;
#else
  const hn::ScalableTag<std::uint64_t> w;
  const hn::ScalableTag<std::uint32_t> u;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(w));
  const auto low_word = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto multiplier_0 = hn::Set(u, 0xd2511f53u);
  const auto multiplier_1 = hn::Set(u, 0xcd9e8d57u);
  const std::uint64_t purpose = static_cast<std::uint64_t>(key.purpose) << 24;
  // Neighbouring lanes are half a vector of blocks apart, so that the interleaving below puts them in order.
  std::uint64_t order[HWY_MAX_BYTES / sizeof(std::uint64_t)];
  for (std::int64_t i = 0; i < lanes; ++i) order[i] = static_cast<std::uint64_t>(i / 2 + i % 2 * (lanes / 2));
  const auto lane_block = hn::LoadU(w, order);
  std::int64_t done = 0;
  for (; done + lanes <= blocks; done += lanes) {
    const std::uint64_t block = first_block + static_cast<std::uint64_t>(done);
    if (low_word(block + static_cast<std::uint64_t>(lanes) - 1) < low_word(block))
      break;  // the upper words of the lanes' counters would differ
    auto c0 = hn::Add(hn::Set(w, block), lane_block);
    auto c1 = hn::Set(w, (block >> 32) | purpose);
    auto c2 = hn::Set(w, key.subject);
    auto c3 = hn::Set(w, key.subject >> 32);
    std::uint32_t k0 = low_word(key.seed);
    std::uint32_t k1 = low_word(key.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const auto product_0 = hn::MulEven(hn::BitCast(u, c0), multiplier_0);
      const auto product_1 = hn::MulEven(hn::BitCast(u, c2), multiplier_1);
      c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product_1), c1), hn::Set(w, k0));
      c1 = product_1;
      c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product_0), c3), hn::Set(w, k1));
      c3 = product_0;
      k0 += 0x9e3779b9u;
      k1 += 0xbb67ae85u;
    }
    const auto pair = [&](hn::VFromD<decltype(w)> first, hn::VFromD<decltype(w)> second) HWY_ATTR {
      return hn::BitCast(w, hn::OddEven(hn::BitCast(u, hn::ShiftLeft<32>(second)), hn::BitCast(u, first)));
    };
    const auto front = pair(c0, c1), back = pair(c2, c3);
    store(hn::InterleaveLower(w, front, back), 4 * done);
    store(hn::InterleaveUpper(w, front, back), 4 * done + 2 * lanes);
  }
  return done;
#endif
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
