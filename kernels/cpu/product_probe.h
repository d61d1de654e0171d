#pragma once
/// Tests a library that was just loaded: a small GEMM is compared to plain loops.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "tranche/core/error.h"

namespace tranche::kernels::cpu {

/// `multiply(a, b, c, n)` computes c = a b for n x n matrices and returns false when it refuses. Throws
/// Error, naming `library` and the probable cause, unless the product is exactly right; its elements are
/// small integers.
template <class Multiply>
void probe_product(const std::string& library, Multiply&& multiply) {
  constexpr std::int64_t n = 24;
  std::array<float, n * n> a{}, b{}, c{};
  for (std::int64_t i = 0; i < n * n; ++i) {
    a[static_cast<std::size_t>(i)] = static_cast<float>(i % 7 - 3);
    b[static_cast<std::size_t>(i)] = static_cast<float>(i % 5 - 2);
  }
  bool right = multiply(a.data(), b.data(), c.data(), n);
  const std::string did = right ? "multiplies wrongly" : "refuses a product that it should support";
  for (std::int64_t i = 0; right && i < n; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (std::int64_t k = 0; k < n; ++k) {
        sum += a[static_cast<std::size_t>(i * n + k)] * b[static_cast<std::size_t>(k * n + j)];
      }
      right = right && sum == c[static_cast<std::size_t>(i * n + j)];
    }
  }
  if (right) return;
  throw Error(
      library + " " + did +
      " in this process: another library that was loaded has symbols of the same names, and they have taken "
      "the place of this one's (LD_DEBUG=bindings shows which library; LD_PRELOAD is a usual cause)");
}

}  // namespace tranche::kernels::cpu
