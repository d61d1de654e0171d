#pragma once
/// Benches of memory-bound kernels on any device. Operands rotate among more memory than a GPU's cache holds,
/// and figures are relative to the bandwidth of the device's own copy in the same process.

#include <benchmark/benchmark.h>

#include <functional>
#include <memory>
#include <vector>

#include "tranche/core/tensor_view.h"
#include "tranche/device/device.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::bench {

/// Bytes that a call has to read, to write, and to update in place; an update counts twice.
struct Traffic {
  double read = 0, written = 0, updated = 0;
  double moved() const { return read + written + 2 * updated; }
};

/// A device of this process, with memory for operands.
class DeviceBench {
 public:
  /// Issues one call of a kernel on one set of operands.
  using Call = std::function<void(Stream&)>;
  /// Creates a set of operands and returns the call on it.
  using Prepare = std::function<Call(DeviceBench&)>;

  /// `threads` of the cpu device; 0: all cores. `small` makes everything tiny and short, so that a bench can
  /// be tested, although its figures mean nothing. Emulated GPUs are always `small`.
  explicit DeviceBench(DeviceKind kind, int threads = 0, bool small = false);
  Device& device() { return *device_; }
  Stream& stream() { return device_->compute_stream(); }
  Workspace workspace() const { return {scratch_.data(), scratch_.bytes()}; }
  bool small() const { return small_; }
  /// Returns `size`, or if small a few thousandths of it, at least 256.
  std::int64_t sized(std::int64_t size) const;

  /// A tensor of uniform random numbers in [low, high); integers are in the range below `high`.
  TensorView tensor(DataType dtype, const Shape& shape, float low = -1, float high = 1);
  /// A copy of a struct in device memory.
  const void* constant(const void* value, std::int64_t bytes);

  /// The bytes and the median seconds of a call, by events on a GPU and by the host's clock on a cpu. An
  /// empty `traffic` is replaced by that of the cost function; if only `updated` is set, the bytes that the
  /// cost function counts beyond it are added. `stream_seconds` is the time of the same traffic without
  /// arithmetic, measured on a cpu in alternation with the call: the smaller median of ordinary and
  /// non-temporal stores.
  struct Result {
    double bytes = 0;
    double seconds = 0, stream_seconds = 0;
  };
  Result measure(const Prepare& prepare, Traffic traffic = {});
  /// Bytes read and written per second by large copies.
  double copy_bandwidth();
  /// Runs the bench of a kernel: reports seconds, bytes, GB/s, `of_copy` and, on a cpu, `of_stream`.
  void run(benchmark::State& state, const Prepare& prepare, const Traffic& traffic = {});

 private:
  double seconds_of(const std::vector<Call>& sets, int calls);
  /// The wall-clock time of `work`; with one thread its processor time, which other processes affect less.
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
