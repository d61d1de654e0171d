#include "kernels/cpu/bf16_tile.h"

#include <algorithm>

#include "kernels/cpu/matmul_onednn.h"
#include "tranche/core/error.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

// GCC 12 calls its own intrinsics' placeholders uninitialized (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// Everything below is compiled for the named instructions, whatever the build's target, and runs only where
// bf16_tiles_are_fast().
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,bmi2")

namespace tranche::kernels::cpu {

namespace {

constexpr std::int64_t lanes = 16;

__mmask16 first_lanes(std::int64_t count) {
  return count >= lanes ? __mmask16{0xffff} : static_cast<__mmask16>((1u << count) - 1u);
}

__m512 add_dot_products(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/// Computes `Rows` rows and `Vectors` vectors of columns; their sums stay in registers over the whole depth.
template <int Rows, int Vectors>
void block(const Bf16Tile& t, std::int64_t row, std::int64_t column) {
  __m512 sum[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  const bfloat16* a = t.a + row * t.stride_a;
  const bfloat16* b = t.b + 2 * column;
  for (std::int64_t k = 0; k < t.depth; k += 2) {
    __m512i right[Vectors];
    for (int v = 0; v < Vectors; ++v) right[v] = _mm512_loadu_si512(b + 2 * lanes * v);
    for (int r = 0; r < Rows; ++r) {
      int pair;
      __builtin_memcpy(&pair, a + r * t.stride_a + k, sizeof(pair));
      const __m512i left = _mm512_set1_epi32(pair);
      for (int v = 0; v < Vectors; ++v) sum[r][v] = add_dot_products(sum[r][v], left, right[v]);
    }
    b += 2 * t.stride_b;
  }
  const __m512 alpha = _mm512_set1_ps(t.alpha);
  for (int r = 0; r < Rows; ++r) {
    float* c = t.c + (row + r) * t.stride_c + column;
    for (int v = 0; v < Vectors; ++v) {
      const __mmask16 mask = first_lanes(t.columns - column - lanes * v);
      const __m512 before = _mm512_maskz_loadu_ps(t.accumulate ? mask : __mmask16{0}, c + lanes * v);
      const __m512 value = t.accumulate ? _mm512_add_ps(before, sum[r][v]) : _mm512_mul_ps(alpha, sum[r][v]);
      _mm512_mask_storeu_ps(c + lanes * v, mask, value);
    }
  }
}

template <int Vectors>
void panel(const Bf16Tile& t, std::int64_t column) {
  constexpr int most = 6;
  std::int64_t row = 0;
  for (; row + most <= t.rows; row += most) block<most, Vectors>(t, row, column);
  switch (t.rows - row) {
    case 5:
      return block<5, Vectors>(t, row, column);
    case 4:
      return block<4, Vectors>(t, row, column);
    case 3:
      return block<3, Vectors>(t, row, column);
    case 2:
      return block<2, Vectors>(t, row, column);
    case 1:
      return block<1, Vectors>(t, row, column);
    default:
      return;
  }
}

/// Loads a row rounded to bf16, in the lower halves of 32 bits.
__m512i row_bits(const float* from, std::int64_t count) {
  const __m512 value = _mm512_maskz_loadu_ps(first_lanes(count), from);
  return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value));
}

/// The distance in rows of prefetches ahead of packing: enough for memory's latency.
constexpr std::int64_t rows_ahead = 16;

void fetch(const void* at) {
  _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0);
}

/// Interleaves two neighbouring rows of 32 bf16, element by element.
struct Interleave {
  __m512i first, second;
  Interleave(__m512i even, __m512i odd) {
    const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
    const __m512i front = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i back = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    first = _mm512_permutex2var_epi64(low, front, high);
    second = _mm512_permutex2var_epi64(low, back, high);
  }
};

/// Transposes 16 x 16 words of 32 bits.
void transpose(__m512i (&v)[lanes]) {
  __m512i t[lanes];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int half = 0; half < 16; half += 8) {
    for (int i = 0; i < 4; ++i) {
      t[half + i] = _mm512_shuffle_i32x4(v[half + i], v[half + 4 + i], 0x88);
      t[half + 4 + i] = _mm512_shuffle_i32x4(v[half + i], v[half + 4 + i], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    v[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
  }
}

/// Loads 16 rows of 16 words from `from`, rows `stride` bytes apart; zeros beyond `rows` and `words`.
void load_words(__m512i (&v)[lanes], const void* from, std::int64_t stride, std::int64_t rows,
                std::int64_t words) {
  const auto* at = static_cast<const char*>(from);
  const __mmask16 mask = first_lanes(words);
  for (std::int64_t r = 0; r < lanes; ++r) {
    v[r] = r < rows ? _mm512_maskz_loadu_epi32(mask, at + r * stride) : _mm512_setzero_si512();
  }
}

constexpr std::int64_t element_bytes = sizeof(bfloat16);

/// Loads 16 rows of up to 32 bf16 (pairs of them are the words); zeros beyond `rows` and `columns`.
void load_pairs(__m512i (&v)[lanes], const bfloat16* from, std::int64_t stride, std::int64_t rows,
                std::int64_t columns) {
  const __mmask32 mask = columns >= 2 * lanes ? ~__mmask32{0} : (__mmask32{1} << columns) - 1;
  for (std::int64_t r = 0; r < lanes; ++r) {
    v[r] = r < rows ? _mm512_maskz_loadu_epi16(mask, from + r * stride) : _mm512_setzero_si512();
  }
}

}  // namespace

void multiply(const Bf16Tile& t) {
  for (std::int64_t column = 0; column < t.columns; column += 4 * lanes) {
    const std::int64_t left = t.columns - column;
    if (left > 3 * lanes) {
      panel<4>(t, column);
    } else if (left > 2 * lanes) {
      panel<3>(t, column);
    } else if (left > lanes) {
      panel<2>(t, column);
    } else {
      panel<1>(t, column);
    }
  }
}

void pack_rows(const bfloat16* from, std::int64_t stride, std::int64_t depth, std::int64_t columns,
               bfloat16* to, std::int64_t to_columns) {
  constexpr std::int64_t pairs = 2 * lanes;
  for (std::int64_t k = 0; k < depth; k += 2) {
    const bfloat16* even = from + k * stride;
    const bool paired = k + 1 < depth;
    for (std::int64_t i = 0; i < columns; i += pairs) {
      const std::int64_t left = columns - i;
      const __mmask32 mask = left >= pairs ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      if (k + rows_ahead + 1 < depth) {
        fetch(even + rows_ahead * stride + i);
        fetch(even + (rows_ahead + 1) * stride + i);
      }
      const Interleave both(_mm512_maskz_loadu_epi16(mask, even + i),
                            _mm512_maskz_loadu_epi16(paired ? mask : __mmask32{0}, even + stride + i));
      bfloat16* out = to + k * to_columns + 2 * i;
      _mm512_storeu_si512(out, both.first);
      if (left > lanes) _mm512_storeu_si512(out + pairs, both.second);
    }
  }
}

void pack_rows(const float* from, std::int64_t stride, std::int64_t depth, std::int64_t columns, bfloat16* to,
               std::int64_t to_columns) {
  for (std::int64_t k = 0; k < depth; k += 2) {
    const float* even = from + k * stride;
    bfloat16* out = to + k * to_columns;
    for (std::int64_t i = 0; i < columns; i += lanes) {
      const __m512i low = row_bits(even + i, columns - i);
      const __m512i high = k + 1 < depth ? row_bits(even + stride + i, columns - i) : _mm512_setzero_si512();
      _mm512_storeu_si512(out + 2 * i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

void pack_transposed(const bfloat16* from, std::int64_t stride, std::int64_t columns, std::int64_t depth,
                     bfloat16* to, std::int64_t to_columns) {
  __m512i words[lanes];
  for (std::int64_t column = 0; column < columns; column += lanes) {
    for (std::int64_t k = 0; k < depth; k += 2 * lanes) {
      const std::int64_t pairs = std::min(lanes, (depth - k) / 2);
      load_words(words, from + column * stride + k, stride * element_bytes, columns - column, pairs);
      transpose(words);
      for (std::int64_t i = 0; i < pairs; ++i) {
        _mm512_storeu_si512(to + (k + 2 * i) * to_columns + 2 * column, words[i]);
      }
    }
  }
}

void transpose_rows(const bfloat16* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                    bfloat16* to, std::int64_t to_stride) {
  __m512i words[lanes];
  for (std::int64_t row = 0; row < rows; row += lanes) {
    for (std::int64_t column = 0; column < columns; column += 2 * lanes) {
      const std::int64_t width = std::min(2 * lanes, columns - column);
      for (std::int64_t ahead = row + rows_ahead; ahead < std::min(rows, row + 2 * rows_ahead); ++ahead) {
        fetch(from + ahead * stride + column);
      }
      load_pairs(words, from + row * stride + column, stride, rows - row, width);
      transpose(words);
      for (std::int64_t i = 0; 2 * i < width; ++i) {
        bfloat16* out = to + (column + 2 * i) * to_stride + row;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(words[i]));
        if (2 * i + 1 == width) break;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + to_stride),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(words[i], 16)));
      }
    }
  }
}

void narrow_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                 bfloat16* to, std::int64_t to_stride) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < columns; i += lanes) {
      const __m512 value = _mm512_maskz_loadu_ps(first_lanes(columns - i), from + row * stride + i);
      _mm256_mask_storeu_epi16(to + row * to_stride + i, first_lanes(columns - i + columns % 2),
                               (__m256i)_mm512_cvtneps_pbh(value));
    }
  }
}

void narrow_transposed(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                       bfloat16* to, std::int64_t to_stride) {
  __m512i words[lanes];
  constexpr std::int64_t float_bytes = sizeof(float);
  for (std::int64_t row = 0; row < rows; row += lanes) {
    for (std::int64_t column = 0; column < columns; column += lanes) {
      load_words(words, from + row * stride + column, stride * float_bytes, rows - row, columns - column);
      transpose(words);
      for (std::int64_t i = 0; i < std::min(lanes, columns - column); ++i) {
        const auto value = _mm512_cvtneps_pbh(_mm512_castsi512_ps(words[i]));
        _mm256_mask_storeu_epi16(to + (column + i) * to_stride + row, first_lanes(rows - row),
                                 (__m256i)value);
      }
    }
  }
}

}  // namespace tranche::kernels::cpu

#pragma GCC pop_options

namespace tranche::kernels::cpu {

bool bf16_tiles_are_fast() {
  static const bool fast =
      __builtin_cpu_supports("avx512bf16") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
      onednn_bf16_is_fast() && onednn_bf16_path() == "oneDNN bf16 (avx512_core_bf16)";
  return fast;
}

}  // namespace tranche::kernels::cpu

#else

namespace tranche::kernels::cpu {

namespace {
[[noreturn]] void absent() {
  throw LogicError("this CPU has no bf16 tiles");
}
}  // namespace

bool bf16_tiles_are_fast() {
  return false;
}
void multiply(const Bf16Tile&) {
  absent();
}
void pack_rows(const bfloat16*, std::int64_t, std::int64_t, std::int64_t, bfloat16*, std::int64_t) {
  absent();
}
void pack_rows(const float*, std::int64_t, std::int64_t, std::int64_t, bfloat16*, std::int64_t) {
  absent();
}
void pack_transposed(const bfloat16*, std::int64_t, std::int64_t, std::int64_t, bfloat16*, std::int64_t) {
  absent();
}
void transpose_rows(const bfloat16*, std::int64_t, std::int64_t, std::int64_t, bfloat16*, std::int64_t) {
  absent();
}
void narrow_rows(const float*, std::int64_t, std::int64_t, std::int64_t, bfloat16*, std::int64_t) {
  absent();
}
void narrow_transposed(const float*, std::int64_t, std::int64_t, std::int64_t, bfloat16*, std::int64_t) {
  absent();
}

}  // namespace tranche::kernels::cpu

#endif
