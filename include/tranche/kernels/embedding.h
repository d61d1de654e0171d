#pragma once
#include <cstdint>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// The value of first_token for a table of the whole vocabulary.
inline constexpr std::int64_t whole_vocabulary = -1;

/// out[b, t, :] = token_table[tokens[b, t], :] + position_table[t, :]. tokens int32 [batch, time], every
/// value within the table (not checked here). Tables and out share a dtype. An empty position_table (`{}`)
/// means none: out is then the rows of the token table. `positions`, int32 [batch, time] within the table
/// (not checked here), replace t as the rows of position_table.
///
/// With first_token >= 0 the table has only the rows of tokens [first_token, first_token + its rows), as when
/// ranks shard the vocabulary: rows of `out` for other tokens become zero, without their position, so that
/// the sum over the ranks has the bits of the whole table's result.
void embedding_forward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& token_table,
                       const ConstTensorView& position_table, const TensorView& out,
                       const ConstTensorView& positions = {}, std::int64_t first_token = whole_vocabulary);

/// token_gradient (fp32 [vocabulary, width]) and position_gradient (fp32 [positions, width]) are added to, in
/// ascending (b, t) order for each row, so the result does not depend on the number of threads. An empty
/// position_gradient means none. With first_token >= 0, tokens outside the table are left out of both
/// gradients.
void embedding_backward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& d_out,
                        const TensorView& token_gradient, const TensorView& position_gradient,
                        std::int64_t first_token = whole_vocabulary);

}  // namespace tranche::kernels
