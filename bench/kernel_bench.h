#pragma once
/// Operands for benches of kernels, and the peak to which kernels are compared.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "core/clock.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/device.h"
#include "tranche/kernels/matmul.h"

namespace tranche::kernels::bench {

/// A tensor of small random values in host memory.
class BenchTensor {
 public:
  BenchTensor(DataType dtype, const Shape& shape)
      : dtype_(dtype), shape_(shape), bytes_(static_cast<std::size_t>(shape.elements() * size_of(dtype))) {
    std::minstd_rand engine(1);
    std::uniform_real_distribution<float> draw(-1, 1);
    for (std::int64_t i = 0; i < shape.elements(); ++i) {
      const float value = draw(engine);
      auto* at = bytes_.data() + i * size_of(dtype);
      if (dtype == DataType::float32) {
        *reinterpret_cast<float*>(at) = value;
      } else {
        *reinterpret_cast<std::uint16_t*>(at) =
            dtype == DataType::bfloat16 ? to_bfloat16(value).bits : to_float16(value).bits;
      }
    }
  }
  TensorView view() { return {bytes_.data(), dtype_, shape_}; }

 private:
  DataType dtype_;
  Shape shape_;
  std::vector<unsigned char> bytes_;
};

/// A cpu device with a number of threads and the smallest workspace.
class BenchMachine {
 public:
  explicit BenchMachine(int threads)
      : device_(make_device({.kind = DeviceKind::cpu, .threads = threads})),
        scratch_(static_cast<std::size_t>(minimum_workspace_bytes) + 256) {
    void* data = scratch_.data();
    std::size_t space = scratch_.size();
    workspace_ = {std::align(256, static_cast<std::size_t>(minimum_workspace_bytes), data, space),
                  minimum_workspace_bytes};
  }
  Stream& stream() { return device_->compute_stream(); }
  const Workspace& workspace() const { return workspace_; }

 private:
  std::unique_ptr<Device> device_;
  std::vector<unsigned char> scratch_;
  Workspace workspace_;
};

/// Operations per second of the fastest of several square GEMMs of this dtype in this run. Measured once for
/// each dtype and number of threads.
double matmul_peak(DataType dtype, int threads);

/// Adds GFLOP/s and the fraction of the peak to a bench that performed `operations` in each iteration.
inline void report_operations(benchmark::State& state, double operations, DataType dtype, int threads) {
  const double total = operations * static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] = benchmark::Counter(total * 1e-9, benchmark::Counter::kIsRate);
  state.counters["share"] =
      benchmark::Counter(total / matmul_peak(dtype, threads), benchmark::Counter::kIsRate);
}

}  // namespace tranche::kernels::bench
