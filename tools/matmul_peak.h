#pragma once
/// The speed of this machine's matmul, which progress is measured against.

#include "tranche/core/dtype.h"
#include "tranche/device/device.h"

namespace tranche::tools {

/// Operations per second of c = a b with square matrices of `dtype` on the device's compute stream. On a GPU
/// it is kernels::gpu_matmul_peak(), as in the benches. On a CPU, with an fp32 result, the best of the calls
/// within about `seconds`, at least three. The matrices have 768 rows, fewer where that would take too long.
/// All ranks of a node measure at once, so that each sees the share of the machine that training leaves it.
/// Its memory is not tracked: it is given back before the engine's is taken. 0 on the meta device.
double measure_matmul_peak(Device& device, DataType dtype, double seconds);

}  // namespace tranche::tools
