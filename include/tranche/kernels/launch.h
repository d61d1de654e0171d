#pragma once
/// Launches a program's own kernels on Tranche's streams: ordered, counted, planned and traced like the
/// library's.

#include <functional>
#include <string_view>

#include "tranche/device/stream.h"

namespace tranche::kernels {

/// The cost of a kernel call, from shapes alone and never from values, so that a plan counts the same as a
/// run.
struct KernelCost {
  double operations = 0;  ///< floating-point operations; a multiply-add is two
  double bytes_read = 0;
  double bytes_written = 0;
};

/// The work of a kernel on each kind of device; null where it has none.
struct KernelWork {
  /// Enqueued: it runs after all earlier work of the stream, on the stream's thread, and may use
  /// Stream::threads(). It owns its captures.
  std::function<void()> cpu;
  /// Called at once, with the stream's cudaStream_t, to launch on that stream only, without waiting; it is
  /// defined in a source that nvcc compiles. It also runs while the stream's work is captured for a replay.
  std::function<void(void* cuda_stream)> cuda;
};

/// Issues a kernel to the stream and counts it. On meta nothing runs: the cost is counted, and simulated
/// under the name. The name also labels the span of a trace. Throws InvalidArgument, naming the kernel, for
/// an empty name, a cost that is negative or not finite, and a stream for whose kind of device there is no
/// work.
void launch(Stream& stream, std::string_view name, const KernelCost& cost, const KernelWork& work);

}  // namespace tranche::kernels
