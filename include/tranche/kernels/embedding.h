#pragma once
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// out[b, t, :] = token_table[tokens[b, t], :] + position_table[t, :]. tokens int32 [batch, time], every
/// value within the table (not checked here). Tables and out share a dtype. An empty position_table (`{}`)
/// means none: out is then the rows of the token table. `positions`, int32 [batch, time] within the table
/// (not checked here), are the rows of position_table in place of t.
void embedding_forward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& token_table,
                       const ConstTensorView& position_table, const TensorView& out,
                       const ConstTensorView& positions = {});

/// token_gradient (fp32 [vocabulary, width]) and position_gradient (fp32 [positions, width]) are added to, in
/// ascending (b, t) order for each row, so the result does not depend on the number of threads. An empty
/// position_gradient means none.
void embedding_backward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& d_out,
                        const TensorView& token_gradient, const TensorView& position_gradient);

}  // namespace tranche::kernels
