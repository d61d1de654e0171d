#pragma once
/// The speed of this machine's matmul, to which progress is compared.

#include "tranche/core/dtype.h"
#include "tranche/device/device.h"

namespace tranche::tools {

/// Measures the operations per second of c = a b with square matrices of `dtype` on the device's compute
/// stream. On a GPU it is kernels::gpu_matmul_peak(), as in the benches. On a CPU, with an fp32 result, it is
/// the best of the calls within about `seconds`, at least three. The matrices have 768 rows, or fewer if that
/// would take too long. All ranks of a node measure at the same time, so that each measures its share of the
/// machine during training. The memory is not tracked; it is freed before the engine allocates. 0 on the meta
/// device.
double measure_matmul_peak(Device& device, DataType dtype, double seconds);

}  // namespace tranche::tools
