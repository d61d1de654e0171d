#pragma once
#include "tranche/kernels/embedding.h"

namespace tranche::kernels::cuda {

/// As in kernels/embedding.h, arguments checked. Forward is one launch, backward two.
void embedding_forward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& token_table,
                       const ConstTensorView& position_table, const TensorView& out);
void embedding_backward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& d_out,
                        const TensorView& token_gradient, const TensorView& position_gradient);

}  // namespace tranche::kernels::cuda
