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

/// Scratch of the heads that share a key and value, without the gradient of their queries, which lies behind
/// it: of all queries of all of them with one_pass, else of one tile.
std::int64_t bf16_backward_floats(std::int64_t head_width);
/// Of heads [first_head, first_head + group), which share a key and value.
void bf16_backward_heads(const AttentionCall& call, std::int64_t first_head, bool one_pass, float* scratch);

}  // namespace tranche::kernels::cpu
