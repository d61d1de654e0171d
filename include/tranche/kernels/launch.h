#pragma once
/// Kernels of a program's own on Tranche's streams: ordered, counted, planned and traced as the library's
/// are.

#include <functional>
#include <string_view>

#include "tranche/device/stream.h"

namespace tranche::kernels {

/// The cost of a kernel call, from shapes alone and never from values, so that a plan counts what a run does.
struct KernelCost {
  double operations = 0;  ///< floating-point operations; a multiply-add is two
  double bytes_read = 0;
  double bytes_written = 0;
};

/// The work of a kernel on each kind of device. Null: there is none for it.
struct KernelWork {
  /// Enqueued: it runs after everything that the stream was given before, on the thread of the stream, and
  /// may use Stream::threads(). It owns what it captures.
  std::function<void()> cpu;
  /// Called at once, with the stream's cudaStream_t, to launch on that stream alone and to wait for nothing;
  /// a source that nvcc compiles defines it. Runs also while the stream's work is captured for a replay.
  std::function<void(void* cuda_stream)> cuda;
};

/// Gives a kernel to the stream and counts it. On meta nothing runs: the cost is counted, and simulated under
/// the name. The name is also the span of a trace. Throws InvalidArgument, naming the kernel, for an empty
/// name, a cost that is negative or not finite, and a stream whose kind of device has no work.
void launch(Stream& stream, std::string_view name, const KernelCost& cost, const KernelWork& work);

}  // namespace tranche::kernels
