#include "kernels/cpu/quantization.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/block_codes.h"
#include "kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/quantization.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// Vectors of fp32 whose length divides a block.
using F = hn::CappedTag<float, 256>;
using Codes = hn::Rebind<std::int8_t, F>;

HWY_INLINE float scale_of(const std::int8_t* block) {
  float scale;
  std::memcpy(&scale, block + quantized_block, sizeof(scale));
  return scale;
}

/// The values of neighbouring codes, as block_value().
HWY_INLINE hn::VFromD<F> block_values(F d, const std::int8_t* codes, hn::VFromD<F> scale) {
  const hn::RebindToSigned<F> integers;
  const auto wide = hn::ConvertTo(d, hn::PromoteTo(integers, hn::LoadU(Codes(), codes)));
  return hn::IfThenElse(hn::Eq(wide, hn::Zero(d)), hn::Zero(d), hn::Mul(wide, scale));
}

template <class T>
HWY_INLINE void quantize_block(const T* values, std::int8_t* block) {
  const F d;
  const hn::RebindToUnsigned<F> bits;
  const hn::RebindToSigned<F> integers;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto greatest = hn::Zero(bits);
  for (std::int64_t i = 0; i < quantized_block; i += lanes) {
    greatest = hn::Max(greatest, hn::And(hn::BitCast(bits, load(d, values + i)), hn::Set(bits, 0x7fffffffu)));
  }
  const std::uint32_t magnitude = hn::GetLane(hn::MaxOfLanes(bits, greatest));
  const BlockScale scale = block_scale(magnitude);
  if (finite_magnitude(magnitude)) {
    const auto inverse = hn::Set(d, scale.inverse), rounds = hn::Set(d, rounds_to_integer);
    for (std::int64_t i = 0; i < quantized_block; i += lanes) {
      const auto rounded = hn::Sub(hn::Add(hn::Mul(load(d, values + i), inverse), rounds), rounds);
      hn::StoreU(hn::DemoteTo(Codes(), hn::ConvertTo(integers, rounded)), Codes(), block + i);
    }
  } else {
    for (std::int64_t i = 0; i < quantized_block; ++i) {
      block[i] = static_cast<std::int8_t>(broken_block_code(to_float(values[i])));
    }
  }
  std::memcpy(block + quantized_block, &scale.scale, sizeof(scale.scale));
}

void quantize_blocks(const ConstTensorView& values, std::int8_t* blocks, std::int64_t first,
                     std::int64_t count) {
  with_floating(values.dtype, [&](auto value) HWY_ATTR {
    const auto* from = static_cast<const decltype(value)*>(values.data);
    for (std::int64_t b = first; b < first + count; ++b) {
      quantize_block(from + b * quantized_block, blocks + b * quantized_block_bytes);
    }
  });
}

void dequantize_blocks(const std::int8_t* blocks, const TensorView& values, std::int64_t first,
                       std::int64_t count) {
  const F d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  with_floating(values.dtype, [&](auto value) HWY_ATTR {
    auto* to = static_cast<decltype(value)*>(values.data);
    for (std::int64_t b = first; b < first + count; ++b) {
      const std::int8_t* block = blocks + b * quantized_block_bytes;
      const auto scale = hn::Set(d, scale_of(block));
      for (std::int64_t i = 0; i < quantized_block; i += lanes) {
        store(d, block_values(d, block + i, scale), to + b * quantized_block + i);
      }
    }
  });
}

/// Computes a block of the sum, all ranks' vectors of a position before the next position. The first rank of
/// a group, and the first sum, are taken unchanged, as in ordered_sum.
template <class Out>
HWY_INLINE void sum_block(const std::int8_t* block, std::int64_t stride, int ranks, SumGroups groups,
                          bool accumulate, Out* out) {
  const F d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const bool folds = groups.size <= 0 && accumulate;
  const int group_size = std::max(std::abs(groups.size), 1);
  for (std::int64_t i = 0; i < quantized_block; i += lanes) {
    const auto piece = [&](int rank) HWY_ATTR {
      const std::int8_t* of_rank = block + rank * stride;
      return block_values(d, of_rank + i, hn::Set(d, scale_of(of_rank)));
    };
    auto total = folds ? load(d, out + i) : hn::Zero(d), outer = total;
    bool first_outer = !folds;
    for (int first = 0, in_outer = 0; first < ranks;) {
      const int end = ranks - first < group_size ? ranks : first + group_size;
      auto partial = piece(first);
      while (++first < end) partial = hn::Add(partial, piece(first));
      outer = in_outer == 0 ? partial : hn::Add(outer, partial);
      if (++in_outer < groups.outer && first < ranks) continue;
      in_outer = 0;
      total = first_outer ? outer : hn::Add(total, outer);
      first_outer = false;
    }
    if (accumulate && !folds) total = hn::Add(load(d, out + i), total);
    store(d, total, out + i);
  }
}

void sum_blocks(const std::int8_t* pieces, int ranks, SumGroups groups, bool accumulate,
                const TensorView& out, std::int64_t first, std::int64_t count) {
  const std::int64_t stride = quantized_bytes(out.elements());
  with_floating(out.dtype, [&](auto result) HWY_ATTR {
    auto* to = static_cast<decltype(result)*>(out.data);
    for (std::int64_t b = first; b < first + count; ++b) {
      sum_block(pieces + b * quantized_block_bytes, stride, ranks, groups, accumulate,
                to + b * quantized_block);
    }
  });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(quantize_blocks);
HWY_EXPORT(dequantize_blocks);
HWY_EXPORT(sum_blocks);

namespace {

constexpr std::int64_t grain = parallel_grain / quantized_block;

}  // namespace

void quantize(int threads, const ConstTensorView& values, void* blocks) {
  parallel_ranges(threads, values.elements() / quantized_block, grain,
                  [&](std::int64_t first, std::int64_t count) {
                    HWY_DYNAMIC_DISPATCH(quantize_blocks)
                    (values, static_cast<std::int8_t*>(blocks), first, count);
                  });
}

void dequantize(int threads, const void* blocks, const TensorView& values) {
  parallel_ranges(threads, values.elements() / quantized_block, grain,
                  [&](std::int64_t first, std::int64_t count) {
                    HWY_DYNAMIC_DISPATCH(dequantize_blocks)
                    (static_cast<const std::int8_t*>(blocks), values, first, count);
                  });
}

void quantized_sum(int threads, const void* pieces, int ranks, SumGroups groups, bool accumulate,
                   const TensorView& out) {
  parallel_ranges(threads, out.elements() / quantized_block, grain,
                  [&](std::int64_t first, std::int64_t count) {
                    HWY_DYNAMIC_DISPATCH(sum_blocks)
                    (static_cast<const std::int8_t*>(pieces), ranks, groups, accumulate, out, first, count);
                  });
}

}  // namespace tranche::kernels::cpu
#endif
