#pragma once
/// Attention with bf16 GEMMs and fp32 sums (bf16_tile.h). The tiles and the softmax are those of the fp32
/// path; the probabilities and the gradient of the scores are rounded to bf16 before they are multiplied.

#include <cstdint>

#include "kernels/cpu/attention_head.h"

namespace tranche::kernels::cpu {

inline constexpr std::int64_t bf16_head_multiple = 32;
/// True for bf16 tensors, on a CPU with fast bf16 tiles, if the head width is a multiple of
/// bf16_head_multiple.
bool attention_runs_in_bf16(DataType dtype, std::int64_t head_width);

/// The scratch of a head with `keys` packed keys and values, in floats.
std::int64_t bf16_forward_floats(std::int64_t head_width, std::int64_t keys);
/// With keep_packed the scratch holds all of the head's keys, else one tile of them.
void bf16_forward_head(const AttentionCall& call, const AttentionHead& head, bool keep_packed,
                       float* scratch);

/// The scratch of a task of backward, in floats, without the gradient of its queries, which follows it: that
/// of one tile, or of all queries of all heads that share a key and value.
std::int64_t bf16_backward_floats(std::int64_t head_width);
/// The bf16 versions of the functions in attention.cpp: the gradients of a tile of keys and values from `k`
/// on, for heads [first_head, first_head + group) that share them; and the gradient of a tile of queries.
void bf16_backward_key_tile(const AttentionCall& call, std::int64_t first_head, std::int64_t k,
                            bool all_queries, float* scratch);
void bf16_backward_query_tile(const AttentionCall& call, const AttentionHead& head, std::int64_t q,
                              float* scratch);

}  // namespace tranche::kernels::cpu
