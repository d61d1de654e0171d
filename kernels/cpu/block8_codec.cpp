#include "kernels/cpu/block8_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>
#include <utility>

#include "core/block8.h"
#include "hwy/cache_control.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/block8_codec.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {
namespace {

constexpr auto block = static_cast<std::int64_t>(block8_elements);

/// Decodes codes one at a time, from a table that stays in the first-level cache.
template <bool with_sign>
HWY_INLINE void decode_plainly(const std::byte* codes, std::int64_t count, float scale, float* to) {
  const std::span<const float, 256> map = detail::block8_map(with_sign);
  for (std::int64_t i = 0; i < count; ++i) to[i] = map[std::to_integer<std::size_t>(codes[i])] * scale;
}

#if HWY_TARGET <= HWY_AVX2

namespace hn = hwy::HWY_NAMESPACE;

/// The arithmetic of block8_code() with two more regions: one before the decades, for magnitudes that have
/// the code of 0, and one after them, for 1. So no magnitude is an exception: the number of a code is the
/// whole part of min(magnitude * slope + offset, last).
constexpr int block8_regions = detail::block8_decades + 2;
struct Block8Regions {
  float from[16];  ///< lower bounds of regions 1 and up
  float slope[16], offset[16], last[16];
};
template <bool with_sign>
constexpr Block8Regions make_block8_regions() {
  Block8Regions regions{};
  [&]<int... decade>(std::integer_sequence<int, decade...>) {
    ((regions.from[decade + 1] = detail::block8_from<with_sign, decade>()), ...);
  }
  (std::make_integer_sequence<int, block8_regions - 1>());
  for (int decade = 0; decade < detail::block8_decades; ++decade) {
    const int cells = detail::block8_cells<with_sign>(decade);
    regions.slope[decade + 1] = static_cast<float>(cells / (0.9 * detail::block8_end(decade)));
    regions.offset[decade + 1] = static_cast<float>(cells) * (8.0f / 9);
    regions.last[decade + 1] = static_cast<float>(2 * cells - 1);
  }
  // In the unsigned map numbers count from 1 here, so that none is negative before rounding.
  regions.offset[0] = regions.last[0] = with_sign ? 0 : 1;
  regions.offset[block8_regions - 1] = regions.last[block8_regions - 1] = with_sign ? 128 : 256;
  return regions;
}
template <bool with_sign>
alignas(64) constexpr Block8Regions block8_regions_of = make_block8_regions<with_sign>();

#endif
#if HWY_TARGET <= HWY_AVX3

/// Magnitudes below this have the code of 0; they are raised to it.
constexpr float least_of_pairs = 0x1p-31f;
constexpr std::uint32_t first_pair = std::bit_cast<std::uint32_t>(least_of_pairs) >> 24;
// A lookup takes its index modulo 16, so the first pair is at index 0 without a subtraction.
static_assert(first_pair % 16 == 0);

/// At most one region begins within two neighbouring powers of two. The bits of a magnitude from bit 24 on
/// are the number of its pair of powers; adding the pair's entry turns them into the number of its region.
template <bool with_sign>
constexpr std::array<std::uint32_t, 16> make_pairs() {
  std::array<std::uint32_t, 16> pairs{};
  std::uint32_t region = 0;
  for (std::uint32_t pair = 0; pair < 16; ++pair) {
    std::uint32_t from = (first_pair + pair) << 24;
    const std::uint32_t end = from + (1u << 24);
    std::uint32_t begins = 0;
    for (std::uint32_t next = region + 1; next < block8_regions; ++next) {
      const auto at = std::bit_cast<std::uint32_t>(block8_regions_of<with_sign>.from[next]);
      if (at >= end) continue;
      from = at;
      ++begins;
    }
    // A throw is no constant expression, so this would not compile.
    if (begins > 1) throw "two regions begin in a pair of powers of two";
    region += begins;
    pairs[pair] = (region << 24) - from;
  }
  return pairs;
}
template <bool with_sign>
alignas(64) constexpr std::array<std::uint32_t, 16> pairs_of = make_pairs<with_sign>();

/// The region's arithmetic for each magnitude, before it is rounded down.
template <bool with_sign>
HWY_INLINE __m512 region_cells(__m512 magnitude) {
  constexpr const Block8Regions& of = block8_regions_of<with_sign>;
  const __m512i bits = _mm512_castps_si512(magnitude);
  const __m512i pair =
      _mm512_permutexvar_epi32(_mm512_srli_epi32(bits, 24), _mm512_load_si512(pairs_of<with_sign>.data()));
  const __m512i region = _mm512_srli_epi32(_mm512_add_epi32(bits, pair), 24);
  const __m512 slope = _mm512_permutexvar_ps(region, _mm512_load_ps(of.slope));
  const __m512 offset = _mm512_permutexvar_ps(region, _mm512_load_ps(of.offset));
  const __m512 last = _mm512_permutexvar_ps(region, _mm512_load_ps(of.last));
  return _mm512_min_ps(_mm512_add_ps(_mm512_mul_ps(magnitude, slope), offset), last);
}

/// The numbers of the codes for shares in [-1, 1]; store_codes() converts them to codes.
template <bool with_sign>
HWY_INLINE __m512i numbers_of(__m512 share) {
  const __m512 least = _mm512_set1_ps(least_of_pairs);
  if constexpr (with_sign) {
    const __m512 sign = _mm512_set1_ps(-0.0f);
    const __m512 cells = region_cells<true>(_mm512_max_ps(_mm512_andnot_ps(sign, share), least));
    return _mm512_cvttps_epi32(_mm512_or_ps(cells, _mm512_and_ps(sign, share)));
  } else {
    return _mm512_cvttps_epi32(region_cells<false>(_mm512_max_ps(share, least)));
  }
}

/// Stores the codes of 64 shares in order. 127 - 128 becomes 0, because the last conversion saturates.
template <bool with_sign>
HWY_INLINE void store_codes(const __m512 (&share)[4], std::byte* to) {
  const __m512i zero = _mm512_set1_epi16(with_sign ? 127 : -1);
  const __m512i lower = _mm512_packs_epi32(numbers_of<with_sign>(share[0]), numbers_of<with_sign>(share[1]));
  const __m512i upper = _mm512_packs_epi32(numbers_of<with_sign>(share[2]), numbers_of<with_sign>(share[3]));
  const __m512i codes = _mm512_packus_epi16(_mm512_add_epi16(lower, zero), _mm512_add_epi16(upper, zero));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, codes));
}

/// The values of a map as four tables of bytes, least significant first.
struct BytePlanes {
  std::uint8_t plane[4][256];
};
template <bool with_sign>
constexpr BytePlanes make_byte_planes() {
  BytePlanes planes{};
  const detail::Block8Map map = detail::make_block8_map<with_sign>();
  for (int code = 0; code < 256; ++code) {
    const auto bits = std::bit_cast<std::uint32_t>(map.values[code]);
    for (int k = 0; k < 4; ++k) planes.plane[k][code] = static_cast<std::uint8_t>(bits >> 8 * k);
  }
  return planes;
}
template <bool with_sign>
alignas(64) constexpr BytePlanes byte_planes = make_byte_planes<with_sign>();

/// For CPUs that look bytes up in a table of 128: decodes one byte of 64 values at a time.
template <bool with_sign>
__attribute__((target("avx512f,avx512bw,avx512vbmi"))) void decode_by_planes(const std::byte* codes,
                                                                             float scale, float* to) {
  const auto& planes = byte_planes<with_sign>.plane;
  const __m512 scales = _mm512_set1_ps(scale);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (std::int64_t i = 0; i < block; i += 64) {
    const __m512i code = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes + i));
    const __mmask64 upper = _mm512_movepi8_mask(code);
    __m512i of[4];
    for (int k = 0; k < 4; ++k) {
      const std::uint8_t* const plane = planes[k];
      of[k] = _mm512_mask_blend_epi8(
          upper, _mm512_permutex2var_epi8(_mm512_load_si512(plane), code, _mm512_load_si512(plane + 64)),
          _mm512_permutex2var_epi8(_mm512_load_si512(plane + 128), code, _mm512_load_si512(plane + 192)));
    }
    const __m512i lower[2] = {_mm512_unpacklo_epi8(of[0], of[1]), _mm512_unpackhi_epi8(of[0], of[1])};
    const __m512i higher[2] = {_mm512_unpacklo_epi8(of[2], of[3]), _mm512_unpackhi_epi8(of[2], of[3])};
    for (int half = 0; half < 2; ++half) {
      const __m512 first = _mm512_castsi512_ps(_mm512_unpacklo_epi16(lower[half], higher[half]));
      const __m512 second = _mm512_castsi512_ps(_mm512_unpackhi_epi16(lower[half], higher[half]));
      _mm512_storeu_ps(to + i + 32 * half, _mm512_mul_ps(first, scales));
      _mm512_storeu_ps(to + i + 32 * half + 16, _mm512_mul_ps(second, scales));
    }
  }
}

template <bool with_sign>
HWY_INLINE void decode_block(const std::byte* codes, float scale, float* to) {
  static const bool has_byte_tables = __builtin_cpu_supports("avx512vbmi") != 0;
  if (has_byte_tables) {
    decode_by_planes<with_sign>(codes, scale, to);
  } else {
    decode_plainly<with_sign>(codes, block, scale, to);
  }
}

#elif HWY_TARGET == HWY_AVX2

/// Divides magnitudes into eight intervals of nearly three powers of two each, in each of which one region
/// begins; region 8 begins in the last. The upper half of a magnitude's bits times `factor` has the number of
/// its interval from bit 16 on; a lookup uses the lowest three bits of it.
struct Stretches {
  std::uint32_t factor = 0;
  float least = 0;         ///< begin of the first interval; smaller magnitudes are raised to it
  std::int32_t first = 0;  ///< the first interval's number
};
constexpr std::uint32_t stretch_of(float magnitude, std::uint32_t factor) {
  return (std::bit_cast<std::uint32_t>(magnitude) >> 16) * factor >> 16;
}
template <bool with_sign>
constexpr Stretches find_stretches() {
  const auto& from = block8_regions_of<with_sign>.from;
  for (std::uint32_t factor = 160; factor < 190; ++factor) {
    const std::uint32_t first = stretch_of(from[1], factor);
    bool fits = stretch_of(1.0f, factor) == first + 7;
    for (std::uint32_t k = 0; k < 8; ++k) fits = fits && stretch_of(from[k + 1], factor) == first + k;
    const std::uint32_t bits = ((first << 16) + factor - 1) / factor << 16;
    if (fits) return {factor, std::bit_cast<float>(bits), static_cast<std::int32_t>(first)};
  }
  throw "two regions begin in a stretch";  // not constant, so it does not compile
}
template <bool with_sign>
constexpr Stretches stretches = find_stretches<with_sign>();

/// Tables indexed by the lowest three bits of an interval or of a line. A magnitude's line is its interval,
/// or the one before if the interval's region begins above the magnitude; so the first line is for magnitudes
/// with the code of 0.
struct StretchTables {
  float from[8], slope[8];
  /// Adding a line, shifted to the exponent's position, to these gives the bits of the line's offset, and of
  /// the largest number whose whole part is the last of its region.
  std::int32_t offset, last;
};
template <bool with_sign>
constexpr StretchTables make_stretch_tables() {
  StretchTables tables{};
  const Block8Regions& of = block8_regions_of<with_sign>;
  const int first_line = stretches<with_sign>.first - 1;
  for (int k = 0; k < 8; ++k) {
    tables.from[(first_line + 1 + k) % 8] = of.from[k + 1];
    tables.slope[(first_line + k) % 8] = of.slope[k];
  }
  // The first line shares its table entry with the last one. Magnitudes from the last border to 1 have a
  // single code, and their offset is 8/9 of it: the slope adds slightly more than the missing ninth, and less
  // than one code. On the first line magnitudes are too small for the slope to matter.
  const float codes = with_sign ? 128 : 256;
  tables.slope[first_line % 8] = codes * 0.112f;
  const int exponent = (with_sign ? -1 : 0) - first_line;
  const auto bits = [&](float number) {
    return std::bit_cast<std::int32_t>(std::bit_cast<std::uint32_t>(number) +
                                       (static_cast<std::uint32_t>(exponent) << 23));
  };
  tables.offset = bits(8.0f / 9);
  tables.last = bits(0x1.fffffep0f);  // the greatest number below 2
  return tables;
}
template <bool with_sign>
alignas(32) constexpr StretchTables stretch_tables = make_stretch_tables<with_sign>();

/// The numbers of the codes for shares in [-1, 1]; store_codes() converts them to codes.
template <bool with_sign>
HWY_INLINE __m256i numbers_of(__m256 share) {
  constexpr const StretchTables& of = stretch_tables<with_sign>;
  const __m256 magnitude = _mm256_max_ps(with_sign ? _mm256_andnot_ps(_mm256_set1_ps(-0.0f), share) : share,
                                         _mm256_set1_ps(stretches<with_sign>.least));
  const __m256i stretch =
      _mm256_mulhi_epu16(_mm256_srli_epi32(_mm256_castps_si256(magnitude), 16),
                         _mm256_set1_epi32(static_cast<int>(stretches<with_sign>.factor)));
  const __m256 from = _mm256_permutevar8x32_ps(_mm256_load_ps(of.from), stretch);
  const __m256i before = _mm256_castps_si256(_mm256_cmp_ps(magnitude, from, _CMP_LT_OQ));
  const __m256i line = _mm256_add_epi32(stretch, before);
  const __m256 slope = _mm256_permutevar8x32_ps(_mm256_load_ps(of.slope), line);
  const __m256i exponent = _mm256_slli_epi32(line, 23);
  const __m256 offset = _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(of.offset)));
  const __m256 last = _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(of.last)));
  const __m256 cells = _mm256_min_ps(_mm256_add_ps(_mm256_mul_ps(magnitude, slope), offset), last);
  const __m256i number = _mm256_cvttps_epi32(cells);
  return with_sign ? _mm256_sign_epi32(number, _mm256_castps_si256(share)) : number;
}

/// Stores the codes of 32 shares in order. Negative numbers become 0, because the last conversion saturates.
template <bool with_sign>
HWY_INLINE void store_codes(const __m256 (&share)[4], std::byte* to) {
  const __m256i zero = _mm256_set1_epi16(with_sign ? 127 : -1);
  const __m256i lower = _mm256_packs_epi32(numbers_of<with_sign>(share[0]), numbers_of<with_sign>(share[1]));
  const __m256i upper = _mm256_packs_epi32(numbers_of<with_sign>(share[2]), numbers_of<with_sign>(share[3]));
  const __m256i codes = _mm256_packus_epi16(_mm256_add_epi16(lower, zero), _mm256_add_epi16(upper, zero));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(codes, order));
}

template <bool with_sign>
HWY_INLINE void decode_block(const std::byte* codes, float scale, float* to) {
  const std::span<const float, 256> map = detail::block8_map(with_sign);
  const __m256 scales = _mm256_set1_ps(scale);
  for (std::int64_t i = 0; i < block; i += 8) {  // eight loads, because a gather is slower on many CPUs
    const auto value = [&](int k) { return map[std::to_integer<std::size_t>(codes[i + k])]; };
    const __m256 values =
        _mm256_setr_ps(value(0), value(1), value(2), value(3), value(4), value(5), value(6), value(7));
    _mm256_storeu_ps(to + i, _mm256_mul_ps(values, scales));
  }
}

#else

template <bool with_sign>
HWY_INLINE void decode_block(const std::byte* codes, float scale, float* to) {
  decode_plainly<with_sign>(codes, block, scale, to);
}

#endif
#if HWY_TARGET <= HWY_AVX2

template <bool with_sign>
HWY_INLINE void encode_block(const float* from, std::byte* codes) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> bits;
  constexpr auto lanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  const auto magnitudes = [&](std::int64_t i) HWY_ATTR {
    return hn::And(hn::BitCast(bits, hn::LoadU(d, from + i)), hn::Set(bits, 0x7fffffffu));
  };
  auto even = hn::Zero(bits), odd = even;
  for (std::int64_t i = 0; i < block; i += 2 * lanes) {
    even = hn::Max(even, magnitudes(i));
    odd = hn::Max(odd, magnitudes(i + lanes));
  }
  const std::uint32_t magnitude = hn::GetLane(hn::MaxOfLanes(bits, hn::Max(even, odd)));
  std::memcpy(codes + block, &magnitude, sizeof(magnitude));
  if (magnitude - 1 >= 0x7f7fffffu) {  // 0, or not finite: every quotient is 0 or a NaN
    std::fill_n(codes, block, static_cast<std::byte>(detail::block8_zero<with_sign>));
    return;
  }
  const detail::Block8Shares shares = detail::block8_shares(std::bit_cast<float>(magnitude));
  if (shares.lift != 1) {  // rare
    detail::encode_block8(with_sign ? DataType::block8 : DataType::block8_unsigned, {from, block8_elements},
                          codes);
    return;
  }
  const auto inverse = hn::Set(d, shares.inverse);
  for (std::int64_t i = 0; i < block; i += 4 * lanes) {
    decltype(inverse.raw) share[4];
    for (int k = 0; k < 4; ++k) share[k] = hn::Mul(hn::LoadU(d, from + i + lanes * k), inverse).raw;
    store_codes<with_sign>(share, codes + i);
  }
}

#else

/// Uses the arithmetic of core/block8.h in loops that the compiler vectorises.
template <bool with_sign>
[[gnu::flatten]] void encode_block(const float* from, std::byte* to) {
  HWY_ALIGN std::int32_t codes[block8_elements];
  std::uint32_t greatest = 0;
  for (std::int64_t i = 0; i < block; ++i) {
    const std::uint32_t magnitude = detail::block8_magnitude(from[i]);
    greatest = magnitude > greatest ? magnitude : greatest;
  }
  const auto scale = std::bit_cast<float>(greatest);
  const detail::Block8Shares share = detail::block8_shares(scale);
  for (std::int64_t i = 0; i < block; ++i) codes[i] = detail::block8_code<with_sign>(share(from[i]));
  for (std::int64_t i = 0; i < block; ++i) to[i] = static_cast<std::byte>(codes[i]);
  std::memcpy(to + block, &scale, sizeof(scale));
}

#endif

template <bool with_sign>
HWY_INLINE void decode_all(const std::byte* from, std::int64_t count, std::int64_t ahead, float* to) {
  for (; count > 0; count -= block, from += block8_bytes, to += block) {
    for (std::int64_t byte = 0; ahead > 0 && byte < block8_bytes; byte += 64) {
      hwy::Prefetch(from + ahead + byte);
    }
    float scale;
    std::memcpy(&scale, from + block, sizeof(scale));
    if (count >= block) {
      decode_block<with_sign>(from, scale, to);
    } else {
      decode_plainly<with_sign>(from, count, scale, to);
    }
  }
}

template <bool with_sign>
HWY_INLINE void encode_all(const float* from, std::int64_t count, std::byte* to) {
  for (; count >= block; count -= block, from += block, to += block8_bytes) encode_block<with_sign>(from, to);
  if (count <= 0) return;
  HWY_ALIGN float whole[block8_elements] = {};  // zeros do not change the scale
  std::copy_n(from, count, whole);
  encode_block<with_sign>(whole, to);
}

}  // namespace

void decode(bool with_sign, const std::byte* from, std::int64_t count, std::int64_t ahead, float* to) {
  with_sign ? decode_all<true>(from, count, ahead, to) : decode_all<false>(from, count, ahead, to);
}

void encode(bool with_sign, const float* from, std::int64_t count, std::byte* to) {
  with_sign ? encode_all<true>(from, count, to) : encode_all<false>(from, count, to);
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(decode);
HWY_EXPORT(encode);

void decode_blocks8(DataType dtype, const std::byte* blocks, std::int64_t count, std::int64_t ahead,
                    float* to) {
  HWY_DYNAMIC_DISPATCH(decode)(dtype == DataType::block8, blocks, count, ahead, to);
}

void encode_blocks8(DataType dtype, const float* from, std::int64_t count, std::byte* blocks) {
  HWY_DYNAMIC_DISPATCH(encode)(dtype == DataType::block8, from, count, blocks);
}

}  // namespace tranche::kernels::cpu
#endif
