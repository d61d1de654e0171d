#pragma once
/// Benches of memory-bound kernels on any device: operands that rotate among more memory than a GPU's cache
/// holds, and the bandwidth of the device's own copy, measured in the same process, to hold them against.

#include <benchmark/benchmark.h>

#include <functional>
#include <memory>
#include <vector>

#include "tranche/core/tensor_view.h"
#include "tranche/device/device.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::bench {

/// Bytes that a call has to read, to write, and to update in place, which moves them twice.
struct Traffic {
  double read = 0, written = 0, updated = 0;
  double moved() const { return read + written + 2 * updated; }
};

/// A device of this process with memory for operands.
class DeviceBench {
 public:
  /// Issues one call of a kernel on one set of operands.
  using Call = std::function<void(Stream&)>;
  /// Makes a set of operands and the call on it.
  using Prepare = std::function<Call(DeviceBench&)>;

  /// `threads` of the cpu device, 0 for all cores. Emulated GPUs are always `small`: everything is tiny and
  /// short, so that a bench can be tried where its figures mean nothing.
  explicit DeviceBench(DeviceKind kind, int threads = 0, bool small = false);
  Device& device() { return *device_; }
  Stream& stream() { return device_->compute_stream(); }
  Workspace workspace() const { return {scratch_.data(), scratch_.bytes()}; }
  bool small() const { return small_; }
  /// `size`; a few thousandths of it, at least 256, when small.
  std::int64_t sized(std::int64_t size) const;

  /// A tensor of uniform random numbers in [low, high); integers are below `high`.
  TensorView tensor(DataType dtype, const Shape& shape, float low = -1, float high = 1);
  /// A struct in device memory.
  const void* constant(const void* value, std::int64_t bytes);

  /// Bytes and median seconds of a call: by events on a GPU, by the host's clock on a cpu. What `traffic`
  /// does not say is read and written as the cost function has it: all where it is empty, and besides what is
  /// updated where it has that alone. `stream_seconds` is of the same traffic without arithmetic, on a cpu,
  /// in turns with the call: the median of ordinary or of non-temporal stores, whichever is less.
  struct Result {
    double bytes = 0;
    double seconds = 0, stream_seconds = 0;
  };
  Result measure(const Prepare& prepare, Traffic traffic = {});
  /// Bytes a second, read and written, of large copies.
  double copy_bandwidth();
  /// One bench of a kernel: reports seconds, bytes, GB/s, `of_copy` and, on a cpu, `of_stream`.
  void run(benchmark::State& state, const Prepare& prepare, const Traffic& traffic = {});

 private:
  double seconds_of(const std::vector<Call>& sets, int calls);
  /// The wall-clock time of `work`; with one thread its processor time, on which other processes act less.
  double host_seconds(const std::function<void()>& work) const;
  /// Seconds of one pass of the traffic.
  double stream_seconds(const Traffic& traffic, bool non_temporal);
  std::unique_ptr<Device> device_;
  bool small_ = false;
  int threads_;
  Buffer scratch_;
  Buffer stream_;  ///< memory of the passes without arithmetic
  std::vector<Buffer> operands_;
  double copy_bandwidth_ = 0;
};

}  // namespace tranche::kernels::bench
