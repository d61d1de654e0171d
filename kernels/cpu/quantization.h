#pragma once
#include "kernels/versions.h"
#include "tranche/kernels/quantization.h"

namespace tranche::kernels::cpu {

/// Like kernels/quantization.h with checked arguments, on the calling thread and `threads - 1` more.
OnThreads<decltype(kernels::quantize)> quantize;
OnThreads<decltype(kernels::dequantize)> dequantize;
OnThreads<decltype(kernels::quantized_sum)> quantized_sum;

}  // namespace tranche::kernels::cpu
