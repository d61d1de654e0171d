#pragma once
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// out = silu(gate) * up, silu(x) = x / (1 + exp(-x)) (Shazeer, 2020). Views of one call share a floating
/// dtype and the number of elements. It is computed in fp32 and rounded once; transformers also rounds
/// silu(gate) to a 16-bit dtype. -infinity gives NaN. out may be gate or up.
void swiglu_forward(Stream& stream, const ConstTensorView& gate, const ConstTensorView& up,
                    const TensorView& out);

/// d_gate = d_out * up * silu'(gate) and d_up = d_out * silu(gate), and `out` recomputed with the bits of
/// swiglu_forward, for a backward that did not save it. It takes one pass with one exponential per element.
/// Each result may be any of the inputs.
void swiglu_forward_backward(Stream& stream, const ConstTensorView& gate, const ConstTensorView& up,
                             const ConstTensorView& d_out, const TensorView& out, const TensorView& d_gate,
                             const TensorView& d_up);

}  // namespace tranche::kernels
