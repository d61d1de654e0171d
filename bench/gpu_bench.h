#pragma once
/// Benches of memory-bound kernels on a GPU: event times, operands that rotate among more memory than the
/// cache holds, and the bandwidth of a device copy, measured in the same process, to hold them against.

#include <benchmark/benchmark.h>

#include <functional>
#include <memory>
#include <vector>

#include "tranche/core/tensor_view.h"
#include "tranche/device/device.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::bench {

/// The GPU of this process with memory for operands; on an emulated device everything is tiny.
class GpuBench {
 public:
  /// Issues one call of a kernel on one set of operands.
  using Call = std::function<void(Stream&)>;
  /// Makes a set of operands and the call on it.
  using Prepare = std::function<Call(GpuBench&)>;

  GpuBench();
  Device& device() { return *device_; }
  Stream& stream() { return device_->compute_stream(); }
  Workspace workspace() const { return {scratch_.data(), scratch_.bytes()}; }
  bool emulated() const { return emulated_; }
  /// `size` on a GPU, a few thousandths of it, at least 256, where it is emulated.
  std::int64_t sized(std::int64_t size) const;

  /// A tensor of uniform random numbers in [low, high); integers are below `high`.
  TensorView tensor(DataType dtype, const Shape& shape, float low = -1, float high = 1);
  /// A struct in device memory.
  const void* constant(const void* value, std::int64_t bytes);

  /// Bytes and median seconds of a call. Bytes are its cost function's where `bytes` is 0.
  struct Result {
    double bytes = 0;
    double seconds = 0;
  };
  Result measure(const Prepare& prepare, double bytes = 0);
  /// Bytes a second, read and written, of large copies.
  double copy_bandwidth();

 private:
  std::unique_ptr<Device> device_;
  bool emulated_ = false;
  Buffer scratch_;
  std::vector<Buffer> operands_;
  double copy_bandwidth_ = 0;
};

/// Null, with state's reason given, where there is no GPU.
GpuBench* gpu_bench(benchmark::State& state);

/// One bench of a kernel: reports seconds, bytes, GB/s and `of_copy`.
void run_on_gpu(benchmark::State& state, const GpuBench::Prepare& prepare, double bytes = 0);

}  // namespace tranche::kernels::bench
