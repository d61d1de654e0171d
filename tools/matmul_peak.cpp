#include "tranche/tools/matmul_peak.h"

#include <algorithm>

#include "tranche/core/clock.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"

namespace tranche::tools {

double measure_matmul_peak(Device& device, DataType dtype, double seconds) {
  if (device.kind() == DeviceKind::meta) return 0;
  constexpr std::int64_t n = 768;
  MemoryResource& memory = device.memory(Tier::device);
  const auto make = [&](std::int64_t bytes) {
    return Buffer(memory, bytes, Category::workspace, "matmul peak");
  };
  const Buffer a = make(n * n * size_of(dtype)), b = make(n * n * size_of(dtype)), c = make(n * n * 4);
  const Buffer scratch = make(kernels::minimum_workspace_bytes);
  const TensorView left{a.data(), dtype, {n, n}}, right{b.data(), dtype, {n, n}};
  Stream& stream = device.compute_stream();
  kernels::fill_zero(stream, left);
  kernels::fill_zero(stream, right);
  const Stopwatch whole;
  double best = 0;
  for (int call = 0; call < 3 || whole.seconds() < seconds; ++call) {
    const Stopwatch one;
    kernels::matmul(stream, {}, left, right, {c.data(), DataType::float32, {n, n}},
                    {scratch.data(), scratch.bytes()});
    stream.synchronize();
    best = std::max(best, 2.0 * n * n * n / std::max(one.seconds(), 1e-9));
  }
  return best;
}

}  // namespace tranche::tools
