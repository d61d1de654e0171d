#include "kernels/cpu/elementwise.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/elementwise.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

void convert(DataType from_dtype, const void* from, DataType to_dtype, void* to, std::int64_t first,
             std::int64_t count) {
  with_floating(from_dtype, [&](auto source) HWY_ATTR {
    with_floating(to_dtype, [&](auto target) HWY_ATTR {
      const auto* in = static_cast<const decltype(source)*>(from) + first;
      auto* out = static_cast<decltype(target)*>(to) + first;
      for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR { store(d, load(d, in + i), out + i); });
    });
  });
}

void sum_of_two(const ConstTensorView& a, const ConstTensorView& b, const TensorView& out, std::int64_t first,
                std::int64_t count) {
  for_each_vector(count, [&](auto d, std::int64_t offset) HWY_ATTR {
    const std::int64_t i = first + offset;
    store_any(d, hn::Add(load_any(d, a.dtype, a.data, i), load_any(d, b.dtype, b.data, i)), out.dtype,
              out.data, i);
  });
}

void accumulate_range(const ConstTensorView& x, const TensorView& accumulator, std::int64_t first,
                      std::int64_t count) {
  with_floating(x.dtype, [&](auto source) HWY_ATTR {
    with_floating(accumulator.dtype, [&](auto target) HWY_ATTR {
      const auto* in = static_cast<const decltype(source)*>(x.data) + first;
      auto* out = static_cast<decltype(target)*>(accumulator.data) + first;
      for_each_vector(count, [&](auto d, std::int64_t i)
                                 HWY_ATTR { store(d, hn::Add(load(d, out + i), load(d, in + i)), out + i); });
    });
  });
}

void scale_range(float factor, const TensorView& x, std::int64_t first, std::int64_t count) {
  with_floating(x.dtype, [&](auto element) HWY_ATTR {
    auto* at = static_cast<decltype(element)*>(x.data) + first;
    for_each_vector(count, [&](auto d, std::int64_t i)
                               HWY_ATTR { store(d, hn::Mul(load(d, at + i), hn::Set(d, factor)), at + i); });
  });
}

void add_bias_rows(const TensorView& x, const ConstTensorView& bias, std::int64_t first_row,
                   std::int64_t rows) {
  const std::int64_t columns = bias.elements();
  for (std::int64_t row = first_row; row < first_row + rows; ++row) {
    for_each_vector(columns, [&](auto d, std::int64_t i) HWY_ATTR {
      const std::int64_t at = row * columns + i;
      const auto sum = hn::Add(load_any(d, x.dtype, x.data, at), load_any(d, bias.dtype, bias.data, i));
      store_any(d, sum, x.dtype, x.data, at);
    });
  }
}

/// Sums columns [first, first + count) of bias_gradient, a tile of columns at a time: wide enough to read
/// rows in runs, narrow enough for the sums to stay in the first-level cache.
void bias_gradient_columns(const ConstTensorView& gradient, float* out, std::int64_t rows,
                           std::int64_t columns, std::int64_t first, std::int64_t count) {
  constexpr std::int64_t block_rows = 64;
  constexpr std::int64_t tile = 1024;
  alignas(64) float block_sum[tile];
  alignas(64) float total[tile];
  with_floating(gradient.dtype, [&](auto storage) HWY_ATTR {
    const auto* from = static_cast<const decltype(storage)*>(gradient.data);
    for (std::int64_t column = first; column < first + count; column += tile) {
      const std::int64_t width = HWY_MIN(tile, first + count - column);
      for (std::int64_t block = 0; block < rows; block += block_rows) {
        const std::int64_t end = HWY_MIN(block + block_rows, rows);
        const auto* first_row = from + block * columns + column;
        for_each_vector(width, [&](auto d, std::int64_t i)
                                   HWY_ATTR { hn::StoreU(load(d, first_row + i), d, block_sum + i); });
        std::int64_t row = block + 1;
        for (; row + 4 <= end; row += 4) {  // four additions, one after the other, to a sum in a register
          const auto* at = from + row * columns + column;
          for_each_vector(width, [&](auto d, std::int64_t i) HWY_ATTR {
            auto sum = hn::Add(hn::LoadU(d, block_sum + i), load(d, at + i));
            sum = hn::Add(sum, load(d, at + columns + i));
            sum = hn::Add(sum, load(d, at + 2 * columns + i));
            hn::StoreU(hn::Add(sum, load(d, at + 3 * columns + i)), d, block_sum + i);
          });
        }
        for (; row < end; ++row) {
          const auto* at = from + row * columns + column;
          for_each_vector(width, [&](auto d, std::int64_t i) HWY_ATTR {
            hn::StoreU(hn::Add(hn::LoadU(d, block_sum + i), load(d, at + i)), d, block_sum + i);
          });
        }
        for_each_vector(width, [&](auto d, std::int64_t i) HWY_ATTR {
          const auto sum = hn::LoadU(d, block_sum + i);
          hn::StoreU(block == 0 ? sum : hn::Add(hn::LoadU(d, total + i), sum), d, total + i);
        });
      }
      for_each_vector(width, [&](auto d, std::int64_t i) HWY_ATTR {
        hn::StoreU(hn::Add(hn::LoadU(d, out + column + i), hn::LoadU(d, total + i)), d, out + column + i);
      });
    }
  });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(convert);
HWY_EXPORT(sum_of_two);
HWY_EXPORT(accumulate_range);
HWY_EXPORT(scale_range);
HWY_EXPORT(add_bias_rows);
HWY_EXPORT(bias_gradient_columns);

void cast(int threads, const ConstTensorView& from, const TensorView& to) {
  if (from.dtype == to.dtype) return copy(threads, from, to);  // keeps every bit, including NaN payloads
  parallel_ranges(threads, to.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(convert)(from.dtype, from.data, to.dtype, to.data, first, count);
  });
}

void copy(int threads, const ConstTensorView& from, const TensorView& to) {
  if (from.data == to.data) return;
  parallel_ranges(threads, to.bytes(), 4 * parallel_grain, [&](std::int64_t first, std::int64_t count) {
    std::memcpy(static_cast<char*>(to.data) + first, static_cast<const char*>(from.data) + first,
                static_cast<std::size_t>(count));
  });
}

void fill_zero(int threads, const TensorView& out) {
  parallel_ranges(threads, out.bytes(), 4 * parallel_grain, [&](std::int64_t first, std::int64_t count) {
    std::memset(static_cast<char*>(out.data) + first, 0, static_cast<std::size_t>(count));
  });
}

void fill_constant(int threads, const TensorView& out, float value) {
  parallel_ranges(threads, out.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    switch (out.dtype) {
      case DataType::bfloat16:
        std::fill_n(static_cast<bfloat16*>(out.data) + first, count, to_bfloat16(value));
        break;
      case DataType::float16:
        std::fill_n(static_cast<float16*>(out.data) + first, count, to_float16(value));
        break;
      default:
        std::fill_n(static_cast<float*>(out.data) + first, count, value);
    }
  });
}

void fill_normal(int threads, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                 float mean, float standard_deviation) {
  auto* data = static_cast<float*>(out.data);
  // A draw costs tens of nanoseconds, so a second thread pays off early.
  parallel_ranges(threads, out.elements(), 1024, [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t i = first; i < first + count; ++i) {
      data[i] = mean + standard_deviation * random_normal(key, static_cast<std::uint64_t>(first_element + i));
    }
  });
}

void fill_uniform(int threads, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                  float low, float high) {
  auto* data = static_cast<float*>(out.data);
  parallel_ranges(threads, out.elements(), 1024, [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t i = first; i < first + count; ++i) {
      data[i] = low + (high - low) * random_uniform(key, static_cast<std::uint64_t>(first_element + i));
    }
  });
}

void add(int threads, const ConstTensorView& a, const ConstTensorView& b, const TensorView& out) {
  parallel_ranges(threads, out.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(sum_of_two)(a, b, out, first, count);
  });
}

void accumulate(int threads, const ConstTensorView& x, const TensorView& accumulator) {
  parallel_ranges(threads, x.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(accumulate_range)(x, accumulator, first, count);
  });
}

void scale(int threads, float factor, const TensorView& x) {
  parallel_ranges(threads, x.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(scale_range)(factor, x, first, count);
  });
}

void add_bias(int threads, const TensorView& x, const ConstTensorView& bias) {
  const std::int64_t columns = bias.elements();
  if (columns == 0) return;
  const std::int64_t grain = std::max<std::int64_t>(1, parallel_grain / columns);
  parallel_ranges(threads, x.elements() / columns, grain, [&](std::int64_t first, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(add_bias_rows)(x, bias, first, count);
  });
}

void bias_gradient(int threads, const ConstTensorView& gradient, const TensorView& bias_gradient) {
  const std::int64_t columns = bias_gradient.elements();
  const std::int64_t rows = columns == 0 ? 0 : gradient.elements() / columns;
  if (rows == 0) return;
  const std::int64_t grain = column_grain(threads, columns, parallel_grain / rows);
  auto* out = static_cast<float*>(bias_gradient.data);
  parallel_ranges(threads, columns, grain, [&](std::int64_t first, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(bias_gradient_columns)(gradient, out, rows, columns, first, count);
  });
}

}  // namespace tranche::kernels::cpu
#endif
