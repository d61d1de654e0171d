#pragma once
/// How often tests repeat what they repeat.

#include <initializer_list>
#include <vector>

namespace tranche::test {

/// True when this build runs under AddressSanitizer or ThreadSanitizer, where everything takes some twenty
/// times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

/// `full` rounds of drawn cases, and a quarter of them (at least one) where sanitized: a sanitizer looks for
/// a kind of access, which few rounds show as well as many, and the full number is run in every release
/// build.
constexpr int rounds(int full) {
  return sanitized ? (full + 3) / 4 : full;
}

/// True when a test runs point number `point` of a sweep: every one, or one in `stride` where sanitized. With
/// a stride that has no factor in common with the lengths of the sweep's loops, every value of each loop is
/// still met.
constexpr bool swept(int point, int stride) {
  return !sanitized || point % stride == 0;
}

/// The values of an instantiated suite: `all`, or `few` of them where sanitized.
template <class T>
std::vector<T> swept_values(std::initializer_list<T> all, std::initializer_list<T> few) {
  return sanitized ? few : all;
}

}  // namespace tranche::test
