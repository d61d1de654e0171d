#pragma once
/// Comparisons for tests of kernels, on the tensors of host_tensor.h.

#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "host_tensor.h"

namespace tranche::kernels::testing {

/// Half a unit in the last place of 1: the largest relative error of one rounding.
inline double rounding_of(DataType dtype) {
  switch (dtype) {
    case DataType::bfloat16:
      return std::ldexp(1.0, -8);
    case DataType::float16:
      return std::ldexp(1.0, -11);
    default:
      return std::ldexp(1.0, -24);
  }
}
/// The absolute error of rounding to `dtype` below its normal range.
inline double underflow_of(DataType dtype) {
  return dtype == DataType::float16 ? std::ldexp(1.0, -25) : 1e-38;
}

/// |got - wanted| <= bound[i] everywhere; NaN in `got` fails.
inline void expect_within(std::span<const double> got, std::span<const double> wanted,
                          std::span<const double> bound, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!(std::abs(got[i] - wanted[i]) <= bound[i])) {
      ADD_FAILURE() << what << ": element " << i << " is " << got[i] << ", wanted " << wanted[i] << " +- "
                    << bound[i] << "; " << repeat_line();
      return;
    }
  }
}
/// |got - wanted| <= absolute + relative * |wanted| everywhere.
inline void expect_close(std::span<const double> got, std::span<const double> wanted, double relative,
                         double absolute, const std::string& what) {
  std::vector<double> bound(wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) bound[i] = absolute + relative * std::abs(wanted[i]);
  expect_within(got, wanted, bound, what);
}

/// Central differences of f with respect to x, in fp64: (f(x + h) - f(x - h)) / 2h.
template <class F>
std::vector<double> finite_differences(std::vector<double> x, const F& f, double h = 1e-5) {
  std::vector<double> gradient(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double before = x[i];
    x[i] = before + h;
    const double above = f(x);
    x[i] = before - h;
    const double below = f(x);
    x[i] = before;
    gradient[i] = (above - below) / (2 * h);
  }
  return gradient;
}
inline double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
/// The relative error in the 2-norm (for a matrix the Frobenius norm).
inline double relative_error(std::span<const double> got, std::span<const double> wanted) {
  double difference = 0;
  for (std::size_t i = 0; i < got.size(); ++i) difference += (got[i] - wanted[i]) * (got[i] - wanted[i]);
  return std::sqrt(difference / dot(wanted, wanted));
}

/// The text of the InvalidArgument that f throws; "" if it throws none.
template <class F>
std::string refusal(const F& f) {
  try {
    f();
  } catch (const InvalidArgument& error) {
    return error.message();
  }
  return {};
}

/// Numbers of threads whose results are compared; a GPU has only one entry.
inline std::vector<int> compared_threads() {
  return on_gpu ? std::vector<int>{1} : std::vector<int>{1, 2, 3, 8};
}

inline constexpr DataType floating_dtypes[] = {DataType::float32, DataType::bfloat16, DataType::float16};

}  // namespace tranche::kernels::testing
