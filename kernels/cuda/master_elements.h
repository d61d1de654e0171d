#pragma once
/// Master weights in any format, and the weights computed from them. Every thread takes the same branches.

#include <bit>
#include <cstdint>

#include "core/split_float.h"
#include "kernels/cuda/elements.h"
#include "tranche/kernels/master_weights.h"

namespace tranche::kernels::cuda {

/// Stores bf16 or other 16-bit patterns in one access.
template <int n>
__device__ __forceinline__ void store_patterns(void* data, std::int64_t i,
                                               const std::uint16_t (&patterns)[n]) {
  Raw<2 * n> raw;
  if constexpr (n == 1) {
    raw.words[0] = patterns[0];
  } else {
#pragma unroll
    for (int k = 0; k < n; k += 2) {
      raw.words[k / 2] = patterns[k] | static_cast<std::uint32_t>(patterns[k + 1]) << 16;
    }
  }
  store_raw(static_cast<std::uint16_t*>(data) + i, raw);
}
template <int n>
__device__ __forceinline__ void load_patterns(const void* data, std::int64_t i,
                                              std::uint16_t (&patterns)[n]) {
  const auto raw = load_raw<Raw<2 * n>>(static_cast<const std::uint16_t*>(data) + i);
#pragma unroll
  for (int k = 0; k < n; ++k) {
    patterns[k] = static_cast<std::uint16_t>(n == 1 ? raw.words[0] : raw.words[k / 2] >> (k % 2 * 16));
  }
}

/// The stochastic rounding's draws for a segment's elements.
struct RoundingDraws {
  RandomKey stream;
  std::int64_t origin;  ///< the tensor's element at the range's element 0

  /// This is not inlined: its work is large beside the cost of a call, and every rule uses it several times.
  template <int n>
  [[gnu::noinline]] __device__ void round(std::int64_t i, const float (&values)[n],
                                          std::uint16_t (&patterns)[n]) const {
    std::int64_t drawn = -1;
    std::array<std::uint32_t, 4> block{};
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const std::int64_t element = origin + i + k;
      if (element / detail::rounding_block != drawn) {
        drawn = element / detail::rounding_block;
        block = detail::unchecked_random_block(stream, static_cast<std::uint64_t>(drawn));
      }
      patterns[k] = detail::round_stochastically(values[k], detail::rounding_draw(block, element)).bits;
    }
  }
};

struct MasterElements {
  template <int n>
  using Loaded = AnyElements::Loaded<n>;

  void* data;    ///< fp32, bf16, or uint16: lower halves, whose upper halves are `weight`
  void* weight;  ///< null: the master is the weight
  DataType dtype, weight_dtype;
  WeightRounding rounding;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    if (dtype != DataType::uint16) return AnyElements{data, dtype}.load<n>(i);
    Loaded<n> loaded;
    loaded.dtype = DataType::float32;
    std::uint16_t high[n], low[n];
    load_patterns<n>(weight, i, high);
    load_patterns<n>(data, i, low);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      loaded.raw.words[k] = std::bit_cast<std::uint32_t>(detail::join_float({bfloat16{high[k]}, low[k]}));
    }
    return loaded;
  }
  template <int n>
  __device__ __forceinline__ static void widen(const Loaded<n>& loaded, float (&values)[n]) {
    AnyElements::widen<n>(loaded, values);
  }

  /// `draws` are only used for stochastic rounding.
  template <int n>
  __device__ __forceinline__ void store(std::int64_t i, const float (&values)[n],
                                        const RoundingDraws& draws) const {
    if (dtype == DataType::float32) {
      Elements<float>{data}.store<n>(i, values);
      if (weight == nullptr) return;
      if (rounding == WeightRounding::nearest_even) {
        AnyElements{weight, weight_dtype}.store<n>(i, values);
        return;
      }
    }
    std::uint16_t patterns[n];
    if (rounding == WeightRounding::stochastic) {
      draws.round<n>(i, values, patterns);
    } else {
#pragma unroll
      for (int k = 0; k < n; ++k) {
        patterns[k] = rounding == WeightRounding::half_away ? detail::split_float(values[k]).high.bits
                                                            : to_bfloat16(values[k]).bits;
      }
    }
    if (weight != nullptr) store_patterns<n>(weight, i, patterns);
    if (dtype == DataType::bfloat16) store_patterns<n>(data, i, patterns);
    if (dtype != DataType::uint16) return;
#pragma unroll
    for (int k = 0; k < n; ++k) patterns[k] = detail::split_float(values[k]).low;
    store_patterns<n>(data, i, patterns);
  }
};

inline MasterElements master_elements_of(const TensorView& master, const TensorView& weight,
                                         WeightRounding rounding) {
  return {master.data, weight.data, master.dtype, weight.dtype, rounding};
}

}  // namespace tranche::kernels::cuda
