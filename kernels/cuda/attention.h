#pragma once
/// The two implementations of attention on GPUs, and the choice between them.

#include <cstdint>
#include <optional>
#include <string_view>

#include "kernels/attention_operands.h"
#include "kernels/cuda/attention_geometry.h"
#include "kernels/dropout_draws.h"
#include "tranche/core/dtype.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::cuda {

/// Checked operands of kernels::attention_forward and attention_backward.
struct AttentionCall : AttentionOperands {
  std::optional<DropoutDraws> dropout;
};

enum class AttentionPath : std::uint8_t { flash, gemm };

/// flash: 16-bit, heads of 64 or 128 elements, no dropout, rows aligned to 16 bytes.
constexpr AttentionPath choose_attention(DataType dtype, std::int64_t head_width, bool dropout,
                                         bool aligned) {
  const bool narrow = dtype == DataType::bfloat16 || dtype == DataType::float16;
  return narrow && (head_width == 64 || head_width == 128) && !dropout && aligned ? AttentionPath::flash
                                                                                  : AttentionPath::gemm;
}
std::string_view name_of(AttentionPath path);

/// The part of the scores that the GEMM path holds at once: `columns` keys (for backward's gradients of keys
/// and values) or `rows` queries of `heads` heads, with rows of fp32 `stride` elements apart.
struct ScoreChunk {
  std::int64_t heads = 1, rows = 0, stride = 0;
  constexpr std::int64_t elements() const { return heads * rows * stride; }
};
constexpr std::int64_t aligned_stride(std::int64_t columns) {
  return columns < 8 ? columns : (columns + 7) / 8 * 8;  // rows aligned to 16 bytes in every dtype
}
/// The chunk with as many whole heads as `bytes` can hold with `copies` of each, else as many queries of one
/// head; 0 rows when not even one fits.
constexpr ScoreChunk query_chunk(std::int64_t heads, std::int64_t queries, std::int64_t keys,
                                 std::int64_t bytes, int copies) {
  const std::int64_t row = copies * aligned_stride(keys) * std::int64_t{sizeof(float)};
  const std::int64_t rows = bytes / row;
  if (rows >= queries) {
    return {rows / queries < heads ? rows / queries : heads, queries, aligned_stride(keys)};
  }
  return {1, rows, aligned_stride(keys)};
}
/// The chunk with as many keys of one head as `bytes` can hold, with `copies` columns and `more` elements for
/// each, if possible a multiple of 8 keys; `rows` are the queries, the number of keys is `stride`.
constexpr ScoreChunk key_chunk(std::int64_t queries, std::int64_t bytes, int copies, std::int64_t more) {
  const std::int64_t columns = bytes / (copies * (queries + more) * std::int64_t{sizeof(float)});
  return {1, queries, columns < 8 ? columns : columns / 8 * 8};
}
/// The workspace with which either path runs: the statistics of one head; or a row of scores and one of their
/// gradients, with the gradients of a key and value.
constexpr std::int64_t attention_workspace_bytes(std::int64_t head_width, std::int64_t time) {
  return 8 * (padded_time(time) + head_width);
}

void attention_forward(Stream& stream, const AttentionCall& call, const Workspace& workspace);
void attention_backward(Stream& stream, const AttentionCall& call, const Workspace& workspace);

void flash_forward(Stream& stream, const AttentionCall& call);
void flash_backward(Stream& stream, const AttentionCall& call, const Workspace& workspace);
void gemm_attention_forward(Stream& stream, const AttentionCall& call, const Workspace& workspace);
void gemm_attention_backward(Stream& stream, const AttentionCall& call, const Workspace& workspace);

}  // namespace tranche::kernels::cuda
