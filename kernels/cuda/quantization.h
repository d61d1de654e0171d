#pragma once
#include "tranche/kernels/quantization.h"

namespace tranche::kernels::cuda {

/// Like kernels/quantization.h, with checked arguments. Each is one launch.
decltype(kernels::quantize) quantize;
decltype(kernels::dequantize) dequantize;
decltype(kernels::quantized_sum) quantized_sum;

}  // namespace tranche::kernels::cuda
