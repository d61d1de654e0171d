#pragma once
/// The ceiling to which trainings and benches on a GPU are compared.

#include <functional>

#include "tranche/core/dtype.h"
#include "tranche/device/device.h"

namespace tranche::kernels {

/// Seconds of one `run`, which issues work to the stream of a GPU: the median of eight batches, each timed by
/// events. A warm-up before determines how many runs make a batch of 5 ms.
double median_seconds(Stream& stream, const std::function<void()>& run);

/// The operations per second of c = a b with square matrices of 8192 random rows (32 where the GPU is
/// emulated), all three of `dtype`, with 32 MiB of workspace. They are random because a GPU's clock depends
/// on the operands: zeros run a third faster. Its memory is freed before it returns.
double gpu_matmul_peak(Device& device, DataType dtype);

}  // namespace tranche::kernels
