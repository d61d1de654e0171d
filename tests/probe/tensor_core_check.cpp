// The warp's expected results, by the emulation's model of the instructions, on which the kernel tests in CI
// depend; products also by their definition.
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>

#include "check.h"
#include "tensor_core.h"
#include "tests/cuda_emulation/tensor_core.h"
#include "tranche/core/dtype.h"
#include "tranche/device/device.h"

namespace tranche::gpu_probe {
namespace {

template <class T>
T rounded(float value) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return to_bfloat16(value);
  } else {
    return to_float16(value);
  }
}

/// Integers, so that products are exact in any order; halves of the last place, which round to even and up;
/// and exponents of both signs.
template <class T>
WarpInput input() {
  WarpInput made{};
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      made.left[row][column] = rounded<T>(static_cast<float>((row * 16 + column) * 7 % 23 - 11)).bits;
      made.right[row][column] = rounded<T>(static_cast<float>((row * 16 + column) * 5 % 19 - 9)).bits;
    }
  }
  const int digits = std::is_same_v<T, bfloat16> ? 8 : 11;
  for (int lane = 0; lane < 32; ++lane) {
    const float unit = std::ldexp(1.0f, 1 - digits);
    made.pairs[lane][0] = 1 + (static_cast<float>(lane) + 0.5f) * unit;  // a tie
    made.pairs[lane][1] = -1 - static_cast<float>(lane) * unit * 0.7f;
    made.exponents[lane] = static_cast<float>(lane - 20) * 3.37f;
  }
  made.exponents[0] = -std::numeric_limits<float>::infinity();
  made.exponents[1] = -160;
  made.exponents[2] = 0;
  return made;
}

std::string at(const char* what, int lane, int i) {
  return std::string(what) + " of lane " + std::to_string(lane) + ", register " + std::to_string(i);
}

/// Prints enough digits to distinguish two fp32 numbers.
std::string digits(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.9g", value);
  return text.data();
}

using Fragments = std::uint32_t[32][4];
void expect_equal(const Fragments& got, const Fragments& wanted, const char* what) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      expect(got[lane][i] == wanted[lane][i], at(what, lane, i) + " is " + std::to_string(got[lane][i]) +
                                                  ", not " + std::to_string(wanted[lane][i]));
    }
  }
}

/// The fragments that the model loads; lane l gives the address row_of(l).
template <class RowOf>
void model_load(bool transposed, const RowOf& row_of, Fragments& loaded) {
  cuda_emulation::LoadMatrix lanes[32];
  void* payloads[32];
  for (int lane = 0; lane < 32; ++lane) {
    lanes[lane] = {reinterpret_cast<const unsigned char*>(row_of(lane)), loaded[lane]};
    payloads[lane] = &lanes[lane];
  }
  (transposed ? cuda_emulation::exchange_transposed_matrices : cuda_emulation::exchange_matrices)(payloads,
                                                                                                  ~0u);
}

template <class T>
void expect_products(const WarpInput& in, const WarpOutput& out) {
  const auto value = [](std::uint16_t bits) { return to_float(T{bits}); };
  for (int part = 0; part < 4; ++part) {
    cuda_emulation::Multiply lanes[32];
    void* payloads[32];
    float modelled[32][4];
    const auto& right = part < 2 ? out.right : out.transposed;
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) modelled[lane][i] = start_of(lane, i);
      lanes[lane] = {
          modelled[lane], out.left[lane], {right[lane][2 * (part % 2)], right[lane][2 * (part % 2) + 1]}};
      payloads[lane] = &lanes[lane];
    }
    cuda_emulation::exchange_products<std::is_same_v<T, bfloat16>>(payloads, ~0u);
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 8 * (part % 2) + 2 * (lane % 4) + i % 2;
        float defined = start_of(lane, i);
        for (int k = 0; k < 16; ++k) {
          defined += value(in.left[row][k]) * value(part < 2 ? in.right[column][k] : in.right[k][column]);
        }
        const float got = out.products[part][lane][i];
        const std::string what = at("mma: the result", lane, i) + " is " + std::to_string(got) + ", not ";
        expect(got == modelled[lane][i],
               what + std::to_string(modelled[lane][i]) + " as the emulation has it");
        expect(got == defined, what + std::to_string(defined) + " as the product of both matrices is");
      }
    }
  }
}

template <class T>
void expect_numbers(const WarpInput& in, const WarpOutput& out) {
  for (int lane = 0; lane < 32; ++lane) {
    const std::uint32_t packed = rounded<T>(in.pairs[lane][0]).bits |
                                 static_cast<std::uint32_t>(rounded<T>(in.pairs[lane][1]).bits) << 16;
    expect(out.packed[lane] == packed, at("cvt: the pair", lane, 0) + " is " +
                                           std::to_string(out.packed[lane]) + ", not " +
                                           std::to_string(packed));
    const double x = in.exponents[lane], wanted = x < -150 ? 0 : std::exp2(x);
    // Two units in the last place of fp32, as PTX specifies.
    expect(std::abs(out.powers[lane] - wanted) <= std::ldexp(wanted, -22),
           "ex2: 2^" + digits(x) + " is " + digits(out.powers[lane]) + ", not " + digits(wanted));
  }
  for (int i = 0; i < 256; ++i) {
    const std::uint16_t wanted = i / 8 % 3 == 0 ? 0 : (&in.left[0][0])[i];
    expect((&out.holes[0][0])[i] == wanted, "cp.async: element " + std::to_string(i) + " is " +
                                                std::to_string((&out.holes[0][0])[i]) + ", not " +
                                                std::to_string(wanted));
  }
}

template <class T>
void check(Device& device) {
  const auto in = std::make_unique<WarpInput>(input<T>());
  const auto out = std::make_unique<WarpOutput>();
  const Buffer on_in(device.memory(Tier::device), sizeof(WarpInput), Category::other, "probe"),
      on_out(device.memory(Tier::device), sizeof(WarpOutput), Category::other, "probe");
  Stream& stream = device.compute_stream();
  device.copy_from_host(stream, on_in.data(), in.get(), sizeof(WarpInput));
  device.fill_bytes(stream, on_out.data(), 0xff, sizeof(WarpOutput));
  run_warp(stream, std::is_same_v<T, bfloat16>, static_cast<const WarpInput*>(on_in.data()),
           static_cast<WarpOutput*>(on_out.data()));
  device.copy_to_host(stream, out.get(), on_out.data(), sizeof(WarpOutput));
  stream.synchronize();

  expect_numbers<T>(*in, *out);
  Fragments left, right, transposed;
  model_load(
      false, [&](int lane) { return &in->left[lane % 16][lane / 16 * 8]; }, left);
  model_load(
      false, [&](int lane) { return &in->right[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]; }, right);
  model_load(
      true, [&](int lane) { return &in->right[lane % 16][lane / 16 * 8]; }, transposed);
  expect_equal(out->left, left, "ldmatrix: the left fragment");
  expect_equal(out->right, right, "ldmatrix: the right fragment");
  expect_equal(out->transposed, transposed, "ldmatrix.trans: the right fragment");
  expect_products<T>(*in, *out);
}

}  // namespace

void check_tensor_core() {
  const auto device = make_device({.kind = DeviceKind::cuda});
  check<bfloat16>(*device);
  check<float16>(*device);
}

}  // namespace tranche::gpu_probe
