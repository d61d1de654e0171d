#include "kernels/cpu/bf16_panel.h"

#include <algorithm>

#include "tranche/core/error.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

// GCC 12 calls its own intrinsics' placeholders uninitialized (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// Compiled for the named instructions, whatever the build's target; it runs only where bf16_tiles_are_fast().
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,bmi2")

namespace tranche::kernels::cpu {

namespace {

constexpr std::int64_t lanes = 16;
constexpr int vectors = panel_columns / lanes;

__m512 widened(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

__m256i narrowed(__m512 value) {
  return (__m256i)_mm512_cvtneps_pbh(value);
}

/// Writes a row of one panel. `mask` has a bit for each of its columns.
void finish_row(const Bf16Panels& p, std::int64_t row, std::int64_t column, const __m512 (&sum)[vectors],
                std::uint64_t mask) {
  for (int v = 0; v < vectors; ++v) {
    const auto part = static_cast<__mmask16>(mask >> (lanes * v));
    const std::int64_t at = row * p.stride_c + column + lanes * v;
    if (p.wide) {
      float* c = static_cast<float*>(p.c) + at;
      const __m512 value = p.accumulate ? _mm512_add_ps(_mm512_maskz_loadu_ps(part, c), sum[v]) : sum[v];
      _mm512_mask_storeu_ps(c, part, value);
    } else {
      bfloat16* c = static_cast<bfloat16*>(p.c) + at;
      __m512 value = sum[v];
      if (p.accumulate) value = _mm512_add_ps(widened(_mm256_maskz_loadu_epi16(part, c)), value);
      if (p.bias != nullptr) {
        const __m256i bias = _mm256_maskz_loadu_epi16(part, p.bias + column + lanes * v);
        value = _mm512_add_ps(widened(narrowed(value)), widened(bias));
      }
      _mm256_mask_storeu_epi16(c, part, narrowed(value));
    }
  }
}

/// Prefetches the part of c that the sums will be added to.
template <int Rows>
void fetch_result(const Bf16Panels& p, std::int64_t row, std::int64_t column) {
  const std::int64_t bytes = p.wide ? sizeof(float) : sizeof(bfloat16), line = 64;
  const char* at = static_cast<const char*>(p.c) + (row * p.stride_c + column) * bytes;
  for (int r = 0; r < Rows; ++r) {
    for (std::int64_t i = 0; i < panel_columns * bytes; i += line) {
      _mm_prefetch(at + r * p.stride_c * bytes + i, _MM_HINT_T0);
    }
  }
}

/// Adds the products of two neighbouring values of k: a pair of bf16 of each row, and one line of a panel.
template <int Rows>
[[gnu::always_inline]] inline void add_depths(const int (&left)[Rows], const bfloat16* b,
                                              __m512 (&sum)[Rows][vectors]) {
  __m512i right[vectors];
  for (int v = 0; v < vectors; ++v) right[v] = _mm512_loadu_si512(b + 2 * lanes * v);
  for (int r = 0; r < Rows; ++r) {
    const __m512i pair = _mm512_set1_epi32(left[r]);
    for (int v = 0; v < vectors; ++v) {
      sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)pair, (__m512bh)right[v]);
    }
  }
}

/// Loads the sums of a vector of columns that an earlier call has stored in c.
__m512 begun_sums(const Bf16Panels& p, std::int64_t row, std::int64_t column, __mmask16 part) {
  return _mm512_maskz_loadu_ps(part, static_cast<const float*>(p.c) + row * p.stride_c + column);
}

/// Computes `Rows` rows of one panel; their sums stay in registers over the whole depth of the call.
template <int Rows>
void block(const Bf16Panels& p, std::int64_t row, std::int64_t column) {
  __m512 sum[Rows][vectors];
  float* sums = p.sums + row * p.stride_sums + column;
  const std::int64_t columns = p.columns - column;
  const std::uint64_t mask = columns >= panel_columns ? ~std::uint64_t{0} : (std::uint64_t{1} << columns) - 1;
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < vectors; ++v) {
      if (!p.first) {
        sum[r][v] = _mm512_loadu_ps(sums + r * p.stride_sums + lanes * v);
      } else if (p.continues) {
        sum[r][v] = begun_sums(p, row + r, column + lanes * v, static_cast<__mmask16>(mask >> (lanes * v)));
      } else {
        sum[r][v] = _mm512_setzero_ps();
      }
    }
  }
  int left[Rows];
  const bfloat16* a = p.a + row * p.stride_a;
  const std::int64_t even_depth = p.depth / 2 * 2;
  const bfloat16* b = p.b + column * (even_depth + 2 * (p.depth % 2));
  if (p.last && p.accumulate) fetch_result<Rows>(p, row, column);
  for (std::int64_t k = 0; k < even_depth; k += 2) {
    for (int r = 0; r < Rows; ++r) __builtin_memcpy(&left[r], a + r * p.stride_a + k, sizeof(left[r]));
    add_depths<Rows>(left, b, sum);
    b += 2 * panel_columns;
  }
  if (even_depth < p.depth) {
    for (int r = 0; r < Rows; ++r) left[r] = a[r * p.stride_a + even_depth].bits;
    add_depths<Rows>(left, b, sum);
  }
  if (!p.last) {
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < vectors; ++v) _mm512_storeu_ps(sums + r * p.stride_sums + lanes * v, sum[r][v]);
    }
    return;
  }
  for (int r = 0; r < Rows; ++r) finish_row(p, row + r, column, sum[r], mask);
}

template <int Rows>
void strip(const Bf16Panels& p, std::int64_t row) {
  for (std::int64_t column = 0; column < p.columns; column += panel_columns) block<Rows>(p, row, column);
}

}  // namespace

void multiply(const Bf16Panels& p) {
  constexpr int most = 6;
  std::int64_t row = 0;
  for (; row + most <= p.rows; row += most) strip<most>(p, row);
  switch (p.rows - row) {
    case 5:
      return strip<5>(p, row);
    case 4:
      return strip<4>(p, row);
    case 3:
      return strip<3>(p, row);
    case 2:
      return strip<2>(p, row);
    case 1:
      return strip<1>(p, row);
    default:
      return;
  }
}

}  // namespace tranche::kernels::cpu

#pragma GCC pop_options

#else

namespace tranche::kernels::cpu {
void multiply(const Bf16Panels&) {
  throw LogicError("this CPU has no bf16 panels");
}
}  // namespace tranche::kernels::cpu

#endif
