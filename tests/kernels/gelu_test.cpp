#include <gmock/gmock.h>

#include <cmath>

#include "kernels/reference/elementwise.h"
#include "tranche/kernels/elementwise.h"
#include "vector_test_support.h"

namespace tranche::kernels::testing {
namespace {

/// Values between -12 and 12, and tiny, huge and special ones.
Guarded inputs() {
  constexpr std::int64_t steps = 24 * 4096;
  const std::vector<float> more{0.0f,  -0.0f, 1e-30f, -1e-30f, 1e-42f, 50.0f, -50.0f, 1e5f,
                                -1e5f, 1e12f, -1e12f, 1e20f,   -1e20f, 3e38f, -3e38f};
  Guarded x(DataType::float32, steps + static_cast<std::int64_t>(more.size()));
  for (std::int64_t i = 0; i < steps; ++i) {
    x.set(i, -12.0f + static_cast<float>(i) / 4096.0f + static_cast<float>(i % 97) * 1e-6f);
  }
  for (std::size_t i = 0; i < more.size(); ++i) x.set(steps + static_cast<std::int64_t>(i), more[i]);
  return x;
}

double unit_in_last_place(double value) {
  const auto magnitude = static_cast<float>(std::fabs(value));
  return static_cast<double>(std::nextafterf(magnitude, INFINITY)) - static_cast<double>(magnitude);
}

TEST(Gelu, ForwardErrorIsSmall) {
  Guarded x = inputs();
  Guarded y(DataType::float32, x.elements());
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    TestStream stream;
    gelu_forward(stream, x.view(), y.view());
    double central = 0;
    double relative = 0;
    for (std::int64_t i = 0; i < x.elements(); ++i) {
      const double wanted = reference::gelu(x.get(i));
      const double error = std::fabs(y.get(i) - wanted);
      if (x.get(i) >= -1) central = std::max(central, error / unit_in_last_place(wanted));
      // The exponent -2u reaches 80 in the tail, where its own rounding matters; further out only the
      // magnitude counts.
      if (std::fabs(wanted) > 1e-30) relative = std::max(relative, error / std::fabs(wanted));
      if (std::fabs(wanted) <= 1e-30) {
        EXPECT_LT(error, 1e-29) << x.get(i);
      }
    }
    RecordProperty(set + "_ulp", std::to_string(central));
    RecordProperty(set + "_relative", std::to_string(relative));
    EXPECT_LT(central, 3) << set;      // units in the last place, for x >= -1
    EXPECT_LT(relative, 2e-5) << set;  // for any x
  }
}

TEST(Gelu, BackwardErrorIsSmall) {
  Guarded x = inputs();
  Guarded dy(DataType::float32, x.elements());
  for (std::int64_t i = 0; i < x.elements(); ++i) dy.set(i, 1.0f);
  Guarded dx(DataType::float32, x.elements());
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    TestStream stream;
    gelu_backward(stream, x.view(), dy.view(), dx.view());
    double worst = 0;
    for (std::int64_t i = 0; i < x.elements(); ++i) {
      const double at = x.get(i);
      const double wanted = std::fabs(at) > 100 ? (at > 0 ? 1.0 : 0.0) : reference::gelu_derivative(at);
      worst = std::max(worst, std::fabs(dx.get(i) - wanted));
    }
    // The derivative is of order one (at most 1.13), so the absolute error is a few 2^-24.
    EXPECT_LT(worst, 3e-7) << set;
  }
}

TEST(Gelu, ReferenceDerivativeIsTheSlopeOfTheReference) {
  for (double x = -8; x <= 8; x += 0.0625) {
    constexpr double h = 1e-5;  // central differences have an error of h^2 |gelu'''| / 6 + 2^-52 |x| / h,
                                // below 1e-9
    const double slope = (reference::gelu(x + h) - reference::gelu(x - h)) / (2 * h);
    EXPECT_NEAR(reference::gelu_derivative(x), slope, 1e-9) << x;
  }
  EXPECT_NEAR(reference::gelu(1.0), 0.841191990608276, 1e-14);  // 0.5 (1 + tanh(0.8338...)), by hand
}

TEST(Gelu, NonFiniteValuesStayVisible) {
  Guarded x(DataType::float32, 3);
  x.set(0, NAN);
  x.set(1, INFINITY);
  x.set(2, -INFINITY);
  Guarded y(DataType::float32, 3);
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    TestStream stream;
    gelu_forward(stream, x.view(), y.view());
    EXPECT_TRUE(std::isnan(y.get(0)));
    EXPECT_EQ(y.get(1), INFINITY);
    EXPECT_FALSE(std::isfinite(y.get(2)));
    gelu_backward(stream, x.view(), x.view(), y.view());
    EXPECT_TRUE(std::isnan(y.get(0)));
    EXPECT_EQ(y.get(1), INFINITY);  // dy = infinity, derivative 1
  }
}

TEST(Gelu, ForwardAndBackwardAtOnceAreTheTwo) {
  Guarded plain = inputs();
  const std::int64_t n = plain.elements() + 3;
  for (const DataType type : floating_types()) {
    Guarded x(type, n), dy(type, n);
    fill_random(dy, 2);
    for (std::int64_t i = 0; i + 3 < n; ++i) x.set(i, plain.get(i));
    x.set(n - 3, NAN);
    x.set(n - 2, INFINITY);
    x.set(n - 1, -INFINITY);
    Guarded wanted_y(type, n), wanted_dx(type, n);
    TestStream one;
    gelu_forward(one, x.view(), wanted_y.view());
    gelu_backward(one, x.view(), dy.view(), wanted_dx.view());
    for (const int threads : thread_counts()) {
      Guarded y(type, n), dx = dy;
      TestStream stream(threads);
      gelu_forward_backward(stream, x.view(), dx.view(), y.view(), dx.view());  // d_x is written over d_y
      EXPECT_TRUE(y.bits() == wanted_y.bits()) << name_of(type) << ", " << threads << " threads";
      EXPECT_TRUE(dx.bits() == wanted_dx.bits()) << name_of(type) << ", " << threads << " threads";
    }
  }
}

TEST(Gelu, SameBitsEverywhereAndInEveryType) {
  for (const DataType type : floating_types()) {
    if (on_gpu && type != DataType::float32) continue;  // the GPU rounds 16-bit arithmetic differently
    for (std::int64_t n = 0; n <= 131; n += (n < 36 ? 1 : 19)) {
      Guarded x(type, n);
      Guarded dy(type, n);
      fill_random(x, 1);
      fill_random(dy, 2);
      // All must give the result of fp32 on one instruction set, one element at a time, rounded once.
      Guarded wanted_y(type, n);
      Guarded wanted_dx(type, n);
      for (std::int64_t i = 0; i < n; ++i) {
        Guarded one(DataType::float32, 1);
        Guarded result(DataType::float32, 1);
        TestStream stream;
        one.set(0, x.get(i));
        gelu_forward(stream, one.view(), result.view());
        wanted_y.set(i, result.get(0));
        result.set(0, dy.get(i));
        gelu_backward(stream, one.view(), result.view(), result.view());
        wanted_dx.set(i, result.get(0));
      }
      for (const auto& set : tested_instruction_sets()) {
        const cpu::InstructionSetForTest use(set);
        Guarded y(type, n);
        Guarded dx(type, n);
        TestStream stream;
        gelu_forward(stream, x.view(), y.view());
        gelu_backward(stream, x.view(), dy.view(), dx.view());
        ASSERT_EQ(y.bits(), wanted_y.bits()) << described(set, n, 1) << ' ' << name_of(type);
        ASSERT_EQ(dx.bits(), wanted_dx.bits()) << described(set, n, 1) << ' ' << name_of(type);
        Guarded again_y(type, n);
        Guarded again_dx(type, n);
        gelu_forward_backward(stream, x.view(), dy.view(), again_y.view(), again_dx.view());
        ASSERT_EQ(again_y.bits(), y.bits()) << "both at once, " << described(set, n, 1) << name_of(type);
        ASSERT_EQ(again_dx.bits(), dx.bits()) << "both at once, " << described(set, n, 1) << name_of(type);
        gelu_backward(stream, x.view(), dy.view(), dy.view());
        ASSERT_EQ(dy.bits(), wanted_dx.bits()) << "in place on dy";
        fill_random(dy, 2);
        gelu_forward(stream, x.view(), x.view());
        ASSERT_EQ(x.bits(), wanted_y.bits()) << "in place on x";
        fill_random(x, 1);
      }
    }
  }
  Guarded x(DataType::bfloat16, large_size);
  fill_random(x, 1);
  Guarded wanted(DataType::bfloat16, large_size);
  TestStream one;
  gelu_forward(one, x.view(), wanted.view());
  for (const int threads : thread_counts()) {
    Guarded y(DataType::bfloat16, large_size);
    TestStream stream(threads);
    gelu_forward(stream, x.view(), y.view());
    EXPECT_TRUE(y.bits() == wanted.bits()) << threads << " threads";
  }
}

}  // namespace
}  // namespace tranche::kernels::testing
