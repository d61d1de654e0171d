#include "device/large_copy.h"

#include <cstddef>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tranche::detail {

#if defined(__SSE2__)

namespace {

constexpr std::size_t line_bytes = 64;
/// A processor's own prefetching stops at the end of a 4 KiB page; prefetching at this distance continues
/// across it.
constexpr std::size_t ahead = 16 * line_bytes;
/// Smaller copies use the C library.
constexpr std::size_t least_bytes = 4096;

void copy_line(char* to, const char* from) {
  const auto load = [&](int part) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + part); };
  const __m128i a = load(0), b = load(1), c = load(2), d = load(3);
  auto* target = reinterpret_cast<__m128i*>(to);
  _mm_stream_si128(target, a);
  _mm_stream_si128(target + 1, b);
  _mm_stream_si128(target + 2, c);
  _mm_stream_si128(target + 3, d);
}

}  // namespace

void copy_past_caches(void* to, const void* from, std::int64_t bytes) {
  auto left = static_cast<std::size_t>(bytes);
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const auto copy_some = [&](std::size_t some) {
    std::memcpy(target, source, some);
    target += some;
    source += some;
    left -= some;
  };
  if (left >= least_bytes) {
    copy_some((line_bytes - reinterpret_cast<std::uintptr_t>(target) % line_bytes) % line_bytes);
    for (; left >= line_bytes; target += line_bytes, source += line_bytes, left -= line_bytes) {
      _mm_prefetch(source + ahead, _MM_HINT_T0);
      copy_line(target, source);
    }
    _mm_sfence();
  }
  copy_some(left);
}

void copy_large(void* to, const void* from, std::int64_t bytes) {
  if (bytes >= std::int64_t{1} << 20) return copy_past_caches(to, from, bytes);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

#else

void copy_past_caches(void* to, const void* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void copy_large(void* to, const void* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

#endif

}  // namespace tranche::detail
