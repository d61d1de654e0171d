#include "kernels/cpu/matmul_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul_rows.cpp"
#include <hwy/foreach_target.h>
// Must follow foreach_target.h.
#include <algorithm>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row-inl.h"

#ifndef TRANCHE_KERNELS_CPU_MATMUL_ROWS_ONCE_
#define TRANCHE_KERNELS_CPU_MATMUL_ROWS_ONCE_
namespace tranche::kernels::cpu {

/// Some rows of a call, with fp32 copies of the 16-bit numbers of a and c.
struct FewRows {
  const MatmulRows& call;
  std::int64_t rows = 0;
  const float* a = nullptr;  ///< [rows, k]
  float* sums = nullptr;     ///< [rows, n]
};

}  // namespace tranche::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

constexpr int row_step = 4, column_step = 4, depth_step = 8;

/// The sums of `rows` rows with `columns` rows of b, one vector each. The order of a sum depends only on its
/// own row and column.
template <int rows, int columns, class T>
HWY_INLINE void dot_products(const float* a, const T* b, std::int64_t k, float* sums, std::int64_t stride) {
  FloatVector vectors[rows][columns];
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) vectors[r][c] = hn::Zero(FloatTag());
  }
  for_vectors(k, [&](std::int64_t i, std::int64_t lanes) {
    FloatVector right[columns];
    for (int c = 0; c < columns; ++c) right[c] = load_at(b + c * k, i, lanes);
    for (int r = 0; r < rows; ++r) {
      const FloatVector left = load_at(a + r * k, i, lanes);
      for (int c = 0; c < columns; ++c) vectors[r][c] = hn::MulAdd(left, right[c], vectors[r][c]);
    }
  });
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) sums[r * stride + c] = sum_of(vectors[r][c]);
  }
}

template <int columns, class T>
HWY_INLINE void dot_all_rows(const FewRows& few, const T* b, std::int64_t column) {
  const std::int64_t k = few.call.k, n = few.call.n;
  std::int64_t r = 0;
  for (; r + row_step <= few.rows; r += row_step) {
    dot_products<row_step, columns>(few.a + r * k, b, k, few.sums + r * n + column, n);
  }
  for (; r < few.rows; ++r) dot_products<1, columns>(few.a + r * k, b, k, few.sums + r * n + column, n);
}

template <class T>
void transposed_columns(const FewRows& few, std::int64_t first, std::int64_t end) {
  const T* b = static_cast<const T*>(few.call.b);
  std::int64_t column = first;
  for (; column + column_step <= end; column += column_step) {
    dot_all_rows<column_step>(few, b + column * few.call.k, column);
  }
  for (; column < end; ++column) dot_all_rows<1>(few, b + column * few.call.k, column);
}

/// Adds the products of `depth` rows of b, from `k` on, to columns [first, end) of all sums, in ascending
/// order.
template <int depth, class T>
HWY_INLINE void add_rows(const FewRows& few, std::int64_t k, std::int64_t first, std::int64_t end) {
  const std::int64_t n = few.call.n;
  const T* b = static_cast<const T*>(few.call.b) + k * n;
  for_vectors(end - first, [&](std::int64_t i, std::int64_t lanes) {
    const std::int64_t column = first + i;
    FloatVector right[depth];
    for (int d = 0; d < depth; ++d) right[d] = load_at(b + d * n, column, lanes);
    for (std::int64_t r = 0; r < few.rows; ++r) {
      const float* left = few.a + r * few.call.k + k;
      FloatVector sum = k == 0 ? hn::Zero(FloatTag()) : load_at(few.sums + r * n, column, lanes);
      for (int d = 0; d < depth; ++d) sum = hn::MulAdd(hn::Set(FloatTag(), left[d]), right[d], sum);
      store_at(sum, few.sums + r * n, column, lanes);
    }
  });
}

template <class T>
void plain_columns(const FewRows& few, std::int64_t first, std::int64_t end) {
  // The sums of a tile stay in the first-level cache while b is read.
  if (few.call.k == 0) {
    for (std::int64_t r = 0; r < few.rows; ++r) {
      std::fill(few.sums + r * few.call.n + first, few.sums + r * few.call.n + end, 0.0f);
    }
  }
  const std::int64_t tile = std::max<std::int64_t>(64, 4096 / few.rows / 64 * 64);
  for (std::int64_t at = first; at < end; at += tile) {
    const std::int64_t stop = std::min(end, at + tile);
    std::int64_t k = 0;
    for (; k + depth_step <= few.call.k; k += depth_step) add_rows<depth_step, T>(few, k, at, stop);
    for (; k < few.call.k; ++k) add_rows<1, T>(few, k, at, stop);
  }
}

/// Adds the bias to columns [first, end), and rounds if c is not fp32.
void finish_columns(const FewRows& few, std::int64_t row, std::int64_t first, std::int64_t end) {
  const MatmulRows& call = few.call;
  with_floating(call.dtype, [&](auto type) {
    using T = decltype(type);
    const auto* bias = static_cast<const T*>(call.bias);
    for (std::int64_t r = 0; r < few.rows; ++r) {
      const float* sums = few.sums + r * call.n + first;
      const auto finish = [&](auto* to) {
        for_vectors(end - first, [&](std::int64_t i, std::int64_t lanes) {
          FloatVector sum = load_at(sums, i, lanes);
          if (bias != nullptr) {
            store_at(sum, to, i, lanes);
            sum = hn::Add(load_at(to, i, lanes), load_at(bias + first, i, lanes));
          }
          store_at(sum, to, i, lanes);
        });
      };
      const std::int64_t at = (row + r) * call.n + first;
      if (call.c_dtype == DataType::float32) {
        if (bias != nullptr) finish(static_cast<float*>(call.c) + at);
      } else {
        finish(static_cast<T*>(call.c) + at);
      }
    }
  });
}

void multiply(const FewRows& few, std::int64_t row, std::int64_t first, std::int64_t count) {
  with_floating(few.call.dtype, [&](auto type) {
    using T = decltype(type);
    if (few.call.transpose_b) {
      transposed_columns<T>(few, first, first + count);
    } else {
      plain_columns<T>(few, first, first + count);
    }
  });
  finish_columns(few, row, first, first + count);
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(multiply);

void matmul_rows(const MatmulRows& call) {
  if (call.m == 0 || call.n == 0) return;
  const auto run = HWY_DYNAMIC_DISPATCH(multiply);
  const bool widens = call.dtype != DataType::float32, narrows = call.c_dtype != DataType::float32;
  const std::int64_t scratch_of_row =
      static_cast<std::int64_t>(sizeof(float)) * ((widens ? call.k : 0) + (narrows ? call.n : 0));
  const std::int64_t most =
      scratch_of_row == 0 ? call.m : std::max<std::int64_t>(1, call.workspace.bytes / scratch_of_row);
  for (std::int64_t row = 0; row < call.m; row += most) {
    FewRows few{.call = call, .rows = std::min(most, call.m - row)};
    auto* scratch = static_cast<float*>(call.workspace.data);
    if (widens) {
      widen_tile(call.dtype, element_at(call.dtype, call.a, row * call.k), call.k, few.rows, call.k, scratch,
                 call.k);
      few.a = scratch;
      scratch += few.rows * call.k;
    } else {
      few.a = static_cast<const float*>(call.a) + row * call.k;
    }
    few.sums = narrows ? scratch : static_cast<float*>(call.c) + row * call.n;
    const std::int64_t grain = call.transpose_b
                                   ? std::max<std::int64_t>(4, row_grain(few.rows * call.k) / 4 * 4)
                                   : column_grain(call.threads, call.n, row_grain(few.rows * call.k));
    parallel_ranges(call.threads, call.n, grain,
                    [&](std::int64_t first, std::int64_t count) { run(few, row, first, count); });
  }
}

}  // namespace tranche::kernels::cpu
#endif
