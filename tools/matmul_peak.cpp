#include "tools/matmul_peak.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/clock.h"
#include "kernels/gpu_matmul_peak.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"

namespace tranche::tools {

namespace {

/// The size of matrices in a CPU's caches, near its peak.
constexpr std::int64_t largest = 768;

/// The matrices are random, because zeros draw less power, and chips with power-dependent clocks run them
/// faster.
void fill_random(Stream& stream, const TensorView& out, std::uint64_t subject, const TensorView& scratch) {
  const TensorView drawn = out.dtype == DataType::float32 ? out : scratch;
  kernels::fill_uniform(stream, drawn, {0, RandomPurpose::test, subject}, 0, -1, 1);
  if (out.dtype != DataType::float32) kernels::cast(stream, drawn, out);
}

/// The operations per second of the fastest call; calls repeat while `more` returns true.
double best_of(Device& device, DataType dtype, std::int64_t n, const std::function<bool(int)>& more) {
  MemoryResource& memory = device.memory(Tier::device);
  const auto make = [&](std::int64_t bytes) {
    return Buffer(memory, bytes, Category::workspace, "matmul peak");
  };
  const Buffer a = make(n * n * size_of(dtype)), b = make(n * n * size_of(dtype)), c = make(n * n * 4);
  const Buffer scratch = make(kernels::minimum_workspace_bytes);
  const TensorView left{a.data(), dtype, {n, n}}, right{b.data(), dtype, {n, n}};
  Stream& stream = device.compute_stream();
  const TensorView product{c.data(), DataType::float32, {n, n}};
  fill_random(stream, left, 0, product);
  fill_random(stream, right, 1, product);
  stream.synchronize();
  double best = 0;
  for (int call = 0; more(call); ++call) {
    const detail::Stopwatch one;
    kernels::matmul(stream, {}, left, right, product, {scratch.data(), scratch.bytes()});
    stream.synchronize();
    best = std::max(best, 2.0 * std::pow(n, 3) / std::max(one.seconds(), 1e-9));
  }
  return best;
}

}  // namespace

double measure_matmul_peak(Device& device, DataType dtype, double seconds) {
  if (device.kind() == DeviceKind::meta) return 0;
  if (device.kind() == DeviceKind::cuda) return kernels::gpu_matmul_peak(device, dtype);
  const detail::Stopwatch whole;
  double best = 0;
  // Larger matrices are nearer to the peak, so the largest size for which a few calls fit into the time is
  // used.
  std::int64_t n = 96;
  const auto fits = [&](std::int64_t size) { return 4 * 2.0 * std::pow(size, 3) < best * seconds; };
  best = best_of(device, dtype, n, [&](int calls) { return calls < 2; });
  while (n < largest && fits(2 * n)) {
    n *= 2;
    best = best_of(device, dtype, n, [&](int calls) { return calls < 1; });
  }
  return best_of(device, dtype, n, [&](int calls) { return calls < 3 || whole.seconds() < seconds; });
}

}  // namespace tranche::tools
