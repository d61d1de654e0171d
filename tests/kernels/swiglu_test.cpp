#include "tranche/kernels/swiglu.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/cpu/instruction_sets.h"
#include "kernels/reference/swiglu.h"
#include "kernels/silu_arithmetic.h"
#include "tests/kernels/kernel_testing.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32;

/// All inputs and outputs of one forward and backward.
struct Operands {
  HostTensor gate, up, d_out, out, d_gate, d_up;

  Operands(DataType dtype, std::int64_t count, Random& random)
      : gate(random.tensor(dtype, {count}, -6, 6)),
        up(random.tensor(dtype, {count}, -2, 2)),
        d_out(random.tensor(dtype, {count}, -2, 2)),
        out(dtype, {count}),
        d_gate(dtype, {count}),
        d_up(dtype, {count}) {}
  void forward(Stream& stream) { swiglu_forward(stream, gate.view(), up.view(), out.view()); }
  void forward_backward(Stream& stream) {
    swiglu_forward_backward(stream, gate.view(), up.view(), d_out.view(), out.view(), d_gate.view(),
                            d_up.view());
  }
};

/// Sizes near vector widths, primes, and one larger than the ranges into which threads divide work.
std::vector<std::int64_t> sizes() {
  std::vector<std::int64_t> result;
  for (std::int64_t n = 0; n <= 35; ++n) result.push_back(n);
  for (const std::int64_t n : {63, 64, 65, 127, 1031, 24593}) result.push_back(n);
  return result;
}

TEST(Swiglu, AgreesWithTheReferenceInEveryDtypeAndOddSizes) {
  Random random(71);
  Machine machine(2);
  for (DataType dtype : floating_dtypes) {
    for (const std::int64_t n : sizes()) {
      SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << n);
      Operands run(dtype, n, random);
      const auto count = static_cast<std::size_t>(n);
      std::vector<double> out(count), d_gate(count), d_up(count);
      reference::swiglu_forward(run.gate.values(), run.up.values(), out);
      reference::swiglu_backward(run.gate.values(), run.up.values(), run.d_out.values(), d_gate, d_up);
      run.forward(machine.stream());
      const double relative = rounding_of(dtype) + 1e-6;
      expect_close(run.out.values(), out, relative, underflow_of(dtype), "out");
      const TestBytes forward = run.out.bytes();
      run.forward_backward(machine.stream());
      EXPECT_EQ(run.out.bytes(), forward);
      // silu' is of order one with a root near -1.28, where its terms cancel.
      expect_close(run.d_gate.values(), d_gate, relative, 4e-6 + underflow_of(dtype), "d_gate");
      expect_close(run.d_up.values(), d_up, relative, underflow_of(dtype), "d_up");
      for (const HostTensor* tensor : {&run.out, &run.d_gate, &run.d_up}) EXPECT_TRUE(tensor->guard_intact());
    }
  }
}

TEST(Swiglu, ErrorOfSiluIsSmallFarOutToo) {
  std::vector<double> gates{0, -0.0, 1e-30, -1e-30, 79, -79, 81, -81, 88.5, -88.5, 1e5, -1e5, 3e38, -3e38};
  for (int i = -4000; i <= 4000; ++i) gates.push_back(i * 0.0199);
  const auto n = static_cast<std::int64_t>(gates.size());
  const std::vector<double> ones(gates.size(), 1.0);
  for (const auto dtype : {fp32, DataType::bfloat16}) {
    HostTensor gate(dtype, {n}, gates), one(dtype, {n}, ones), out(dtype, {n}), d_gate(dtype, {n}),
        d_up(dtype, {n});
    Machine machine;
    swiglu_forward_backward(machine.stream(), gate.view(), one.view(), one.view(), out.view(), d_gate.view(),
                            d_up.view());
    const auto at = gate.values(), got = out.values(), slope = d_gate.values();
    const double error = dtype == fp32 ? 4e-7 : rounding_of(dtype);
    for (std::size_t i = 0; i < at.size(); ++i) {
      // Below -80 silu is less than 1e-33 and counts as 0.
      EXPECT_NEAR(got[i], reference::silu(at[i]), error * std::abs(reference::silu(at[i])) + 2e-33) << at[i];
      const double wanted =
          std::abs(at[i]) > 100 ? (at[i] > 0 ? 1.0 : 0.0) : reference::silu_derivative(at[i]);
      // The derivative's terms cancel near its root at -1.28.
      const double slope_error = dtype == fp32 ? 4e-7 : error * std::abs(wanted) + 4e-6;
      EXPECT_NEAR(slope[i], wanted, slope_error) << at[i];
    }
    EXPECT_EQ(d_up.values(), got);
  }
}

TEST(Swiglu, NonFiniteValuesStayVisible) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr std::size_t n = 39;  // whole vectors and a remainder
  std::vector<double> gates(n);
  for (std::size_t i = 0; i < n; ++i) gates[i] = std::array{double{NAN}, infinity, -infinity}[i % 3];
  for (DataType dtype : floating_dtypes) {
    const Shape shape{static_cast<std::int64_t>(n)};
    HostTensor gate(dtype, shape, gates), one(dtype, shape, std::vector<double>(n, 1.0)), out(dtype, shape),
        d_gate(dtype, shape), d_up(dtype, shape);
    Machine machine;
    swiglu_forward_backward(machine.stream(), gate.view(), one.view(), one.view(), out.view(), d_gate.view(),
                            d_up.view());
    for (std::size_t i = 0; i < n; i += 3) {
      EXPECT_TRUE(std::isnan(out.values()[i]) && std::isnan(d_gate.values()[i]) &&
                  std::isnan(d_up.values()[i]));
      EXPECT_EQ(out.values()[i + 1], infinity);
      EXPECT_EQ(d_gate.values()[i + 1], 1);
      EXPECT_FALSE(std::isfinite(out.values()[i + 2]));
      EXPECT_NEAR(d_gate.values()[i + 2], 0, 1e-30);
    }
  }
}

TEST(Swiglu, ReferenceBackwardAgreesWithFiniteDifferences) {
  Random random(72);
  const auto gate = random.values(41, -8, 8), up = random.values(41), d_out = random.values(41);
  const auto loss = [&](const std::vector<double>& g, const std::vector<double>& u) {
    std::vector<double> out(g.size());
    reference::swiglu_forward(g, u, out);
    return dot(out, d_out);
  };
  std::vector<double> d_gate(41), d_up(41);
  reference::swiglu_backward(gate, up, d_out, d_gate, d_up);
  // Finite differences with h = 1e-5 have errors of about 1e-10.
  expect_close(d_gate, finite_differences(gate, [&](const auto& v) { return loss(v, up); }), 0, 1e-8,
               "d_gate");
  expect_close(d_up, finite_differences(up, [&](const auto& v) { return loss(gate, v); }), 0, 1e-8, "d_up");
}

TEST(Swiglu, BitsAreThoseOfOneElementOnEveryInstructionSet) {
  if (on_gpu) GTEST_SKIP() << "a GPU contracts multiplies and adds";
  Machine machine;
  for (DataType dtype : floating_dtypes) {
    for (const std::int64_t n : {5, 33, 131}) {
      Random random(73);
      Operands run(dtype, n, random);
      const std::vector<double> far_out{88.5, -88.5, 60000, -60000, 20.25};
      auto given = run.gate.values();
      std::copy(far_out.begin(), far_out.end(), given.begin());
      run.gate = HostTensor(dtype, {n}, given);
      const auto gate = run.gate.values(), up = run.up.values(), d_out = run.d_out.values();
      std::vector<double> out, d_gate, d_up;
      for (std::size_t i = 0; i < gate.size(); ++i) {
        const auto factor = static_cast<float>(up[i]), gradient = static_cast<float>(d_out[i]);
        const auto x = static_cast<float>(gate[i]);
        const SiluElement silu =
            dtype == DataType::bfloat16 ? coarse_silu_element(x) : silu_element<AccurateSilu>(x);
        out.push_back(silu.value * factor);
        d_gate.push_back(gradient * factor * silu.derivative);
        d_up.push_back(gradient * silu.value);
      }
      for (const auto& set : cpu::instruction_sets()) {
        const cpu::InstructionSetForTest use(set);
        run.forward_backward(machine.stream());
        EXPECT_EQ(run.out.values(), HostTensor(dtype, {n}, out).values()) << set << repeat_line();
        EXPECT_EQ(run.d_gate.values(), HostTensor(dtype, {n}, d_gate).values()) << set << repeat_line();
        EXPECT_EQ(run.d_up.values(), HostTensor(dtype, {n}, d_up).values()) << set << repeat_line();
      }
    }
  }
}

TEST(Swiglu, BitsDoNotDependOnThreadsAndResultsMayBeOperands) {
  Machine one;
  for (int threads : compared_threads()) {
    Machine machine(threads);
    for (DataType dtype : floating_dtypes) {
      SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << threads << " threads");
      Random random(74);
      const Operands given(dtype, 24593, random);
      Operands wanted = given;
      wanted.forward_backward(one.stream());
      Operands run = given;
      run.forward_backward(machine.stream());
      EXPECT_TRUE(run.out.bytes() == wanted.out.bytes() && run.d_gate.bytes() == wanted.d_gate.bytes() &&
                  run.d_up.bytes() == wanted.d_up.bytes());
      Operands in_place = given;  // out replaces d_out, d_gate replaces gate, and d_up replaces up
      swiglu_forward_backward(machine.stream(), in_place.gate.view(), in_place.up.view(),
                              in_place.d_out.view(), in_place.d_out.view(), in_place.gate.view(),
                              in_place.up.view());
      EXPECT_TRUE(in_place.d_out.bytes() == wanted.out.bytes());
      EXPECT_TRUE(in_place.gate.bytes() == wanted.d_gate.bytes());
      EXPECT_TRUE(in_place.up.bytes() == wanted.d_up.bytes());
      Operands on_gate = given, on_up = given;
      swiglu_forward(machine.stream(), on_gate.gate.view(), on_gate.up.view(), on_gate.gate.view());
      swiglu_forward(machine.stream(), on_up.gate.view(), on_up.up.view(), on_up.up.view());
      EXPECT_TRUE(on_gate.gate.bytes() == wanted.out.bytes() && on_up.up.bytes() == wanted.out.bytes());
    }
  }
}

TEST(Swiglu, MetaCountsLikeTheCpuAndTouchesNothing) {
  Random random(75);
  Operands run(DataType::bfloat16, 60, random);
  Machine cpu, meta(1, 0, DeviceKind::meta);
  run.forward(cpu.stream());
  run.forward_backward(cpu.stream());
  const TensorView x{nullptr, DataType::bfloat16, {6, 10}};
  swiglu_forward(meta.stream(), x, x, x);
  swiglu_forward_backward(meta.stream(), x, x, x, x, x, x);
  const WorkCount& work = meta.stream().work();
  EXPECT_EQ(work.kernels, 2);
  EXPECT_EQ(work.floating_point_operations, (18.0 + 25.0) * 60);
  EXPECT_EQ(work.bytes_read, 2.0 * 60 * (2 + 3));
  EXPECT_EQ(work.bytes_written, 2.0 * 60 * (1 + 3));
  EXPECT_EQ(work.floating_point_operations, cpu.stream().work().floating_point_operations);
  EXPECT_EQ(work.bytes_read, cpu.stream().work().bytes_read);
  EXPECT_EQ(work.bytes_written, cpu.stream().work().bytes_written);
}

TEST(Swiglu, ErrorsNameTheOperand) {
  Machine machine(1, 0, DeviceKind::meta);
  const TensorView x{nullptr, fp32, {6, 10}}, half{nullptr, DataType::float16, {6, 10}},
      brief{nullptr, fp32, {59}}, ids{nullptr, DataType::int32, {60}};
  const auto forward = [&](const TensorView& gate, const TensorView& up, const TensorView& out) {
    return refusal([&] { swiglu_forward(machine.stream(), gate, up, out); });
  };
  EXPECT_EQ(forward(ids, x, x), "swiglu_forward: `gate` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(forward(x, half, x), "swiglu_forward: `up` has dtype fp16, wanted fp32");
  EXPECT_EQ(forward(x, x, brief), "swiglu_forward: `out` has 59 elements, wanted 60");
  const auto backward = [&](const TensorView& d_out, const TensorView& d_gate, const TensorView& d_up) {
    return refusal([&] { swiglu_forward_backward(machine.stream(), x, x, d_out, x, d_gate, d_up); });
  };
  EXPECT_EQ(backward(half, x, x), "swiglu_forward_backward: `d_out` has dtype fp16, wanted fp32");
  EXPECT_EQ(backward(x, brief, x), "swiglu_forward_backward: `d_gate` has 59 elements, wanted 60");
  EXPECT_EQ(backward(x, x, half), "swiglu_forward_backward: `d_up` has dtype fp16, wanted fp32");
}

}  // namespace
}  // namespace tranche::kernels
