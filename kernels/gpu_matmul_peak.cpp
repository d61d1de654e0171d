#include "kernels/gpu_matmul_peak.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "device/cuda_probe.h"
#include "tranche/core/tensor_view.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"

namespace tranche::kernels {

double median_seconds(Stream& stream, const std::function<void()>& run) {
  constexpr int samples = 9;
  constexpr double batch_seconds = 5e-3;
  int runs = 1;
  std::vector<double> measured;
  run();
  stream.synchronize();
  for (int i = 0; i < samples; ++i) {
    run();  // keeps the GPU busy until the host has queued the runs
    const Event begin = stream.record();
    for (int j = 0; j < runs; ++j) run();
    const Event end = stream.record();
    end.wait();
    const double seconds = (end.passed_at() - begin.passed_at()) / runs;
    if (i == 0) {
      runs = std::clamp(static_cast<int>(batch_seconds / std::max(seconds, 1e-7)), 1, 1000);
      continue;
    }
    measured.push_back(seconds);
  }
  const auto middle = measured.begin() + static_cast<std::ptrdiff_t>(measured.size() / 2);
  std::nth_element(measured.begin(), middle, measured.end());
  return *middle;
}

double gpu_matmul_peak(Device& device, DataType dtype) {
  const std::int64_t size = detail::probe_cuda().emulated ? 32 : 8192;
  constexpr std::int64_t workspace_bytes = std::int64_t{32} << 20;
  MemoryResource& memory = device.memory(Tier::device);
  Stream& stream = device.compute_stream();
  std::vector<Buffer> buffers;
  const auto tensor = [&](DataType of) {
    buffers.emplace_back(memory, size * size * size_of(of), Category::workspace, "matmul peak");
    return TensorView{buffers.back().data(), of, {size, size}};
  };
  const TensorView a = tensor(dtype), b = tensor(dtype), c = tensor(dtype);
  const Buffer workspace(memory, workspace_bytes, Category::workspace, "matmul peak");
  {
    const Buffer wide(memory, size * size * 4, Category::workspace, "matmul peak");
    const TensorView drawn{wide.data(), DataType::float32, {size, size}};
    std::uint64_t subject = 0;
    for (const TensorView& operand : {a, b}) {
      fill_uniform(stream, drawn, {.seed = 1, .subject = ++subject}, 0, -1.0f, 1.0f);
      cast(stream, drawn, operand);
    }
    stream.synchronize();
  }
  const double seconds = median_seconds(stream, [&] {
    matmul(stream, {}, a, b, c, {workspace.data(), workspace_bytes});
  });
  return 2.0 * std::pow(static_cast<double>(size), 3) / std::max(seconds, 1e-9);
}

}  // namespace tranche::kernels
