#pragma once
/// Attention with bf16 GEMMs and fp32 sums (bf16_tile.h). The tiles and the softmax are those of the fp32
/// path; the probabilities and the gradient of the scores are rounded to bf16 before they are multiplied.

#include <cstdint>

#include "kernels/cpu/attention_head.h"

namespace tranche::kernels::cpu {

inline constexpr std::int64_t bf16_head_multiple = 32;
/// bf16 tensors, on a CPU with fast bf16 tiles, in heads of whole multiples of bf16_head_multiple elements.
bool attention_runs_in_bf16(DataType dtype, std::int64_t head_width);

/// Scratch of a head that holds `keys` packed keys and values.
std::int64_t bf16_forward_floats(std::int64_t head_width, std::int64_t keys);
/// With keep_packed the scratch is for all of the head's keys, else for one tile of them.
void bf16_forward_head(const AttentionCall& call, const AttentionHead& head, bool keep_packed,
                       float* scratch);

/// Scratch of a task of backward without the gradient of its queries, which lies behind it: of one tile, or
/// of all queries of all heads that share a key and value.
std::int64_t bf16_backward_floats(std::int64_t head_width);
/// The tiles of attention.cpp, in bf16: gradients of the keys and values from `k` on that heads [first_head,
/// first_head + group) share, and of a tile of queries alone.
void bf16_backward_key_tile(const AttentionCall& call, std::int64_t first_head, std::int64_t k,
                            bool all_queries, float* scratch);
void bf16_backward_query_tile(const AttentionCall& call, const AttentionHead& head, std::int64_t q,
                              float* scratch);

}  // namespace tranche::kernels::cpu
