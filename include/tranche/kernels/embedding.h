#pragma once
#include <cstdint>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// first_token of a table that has the whole vocabulary.
inline constexpr std::int64_t whole_vocabulary = -1;

/// out[b, t, :] = token_table[tokens[b, t], :] + position_table[t, :]. tokens int32 [batch, time], every
/// value within the table (not checked here). Tables and out share a dtype. An empty position_table (`{}`)
/// means none: out is then the rows of the token table. `positions`, int32 [batch, time] within the table
/// (not checked here), are the rows of position_table in place of t.
///
/// With first_token >= 0 the table has the rows of tokens [first_token, first_token + its rows) alone, as
/// where ranks share out the vocabulary: the rows of `out` of other tokens become zero, without their
/// position, so that the sum over the ranks is what the whole table gives, in the same bits.
void embedding_forward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& token_table,
                       const ConstTensorView& position_table, const TensorView& out,
                       const ConstTensorView& positions = {}, std::int64_t first_token = whole_vocabulary);

/// token_gradient (fp32 [vocabulary, width]) and position_gradient (fp32 [positions, width]) are added to, in
/// ascending (b, t) order for each row, so the result does not depend on the number of threads. An empty
/// position_gradient means none. With first_token >= 0 the rows of other tokens than the table's are left
/// out, of both gradients.
void embedding_backward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& d_out,
                        const TensorView& token_gradient, const TensorView& position_gradient,
                        std::int64_t first_token = whole_vocabulary);

}  // namespace tranche::kernels
