#pragma once
#include <cstdint>
#include <string_view>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels {

/// Heads lie side by side in each token's row, in the columns from first_column on. `rows` is [batch, tokens,
/// n] or [batch * tokens, n]: a separate tensor, or a part of wider rows (GPT-2 packs queries, keys and
/// values).
struct ConstHeads {
  ConstTensorView rows;
  std::int64_t first_column = 0;
};
struct Heads {
  TensorView rows;
  std::int64_t first_column = 0;
};

struct AttentionOptions {
  std::int64_t heads = 1;
  std::int64_t key_value_heads = 0;  ///< divides heads; each serves a group of neighbours; 0: heads
  std::int64_t window = 0;           ///< a query sees the last `window` keys, including its own; 0: all
  float scale = 0;                   ///< of scores; 0: 1 / sqrt(head width)
  /// Dropout of the probabilities; the index of an element is ((first_head + head) * time + query) * time +
  /// key.
  DropoutOptions dropout;
  /// int32 [batch, time] in memory of the stream's device, or empty: for each token, the first token of its
  /// document within the row. It never decreases along a row; earlier keys are not seen.
  ConstTensorView document_begin = {};
  std::int64_t first_head = 0;  ///< heads of the layer before these, on other ranks
  /// The token of the first query, if other ranks have the queries of other tokens: query, d_query, out,
  /// d_out and log_sum_exp then have `queries` tokens, fewer than `time`, the number of keys.
  std::int64_t first_query = 0;
};

/// Causal self-attention: query t sees keys [max(document_begin, t - window + 1, 0), t]. query, d_query and
/// out hold `heads` heads, key and value key_value_heads. out [batch, queries, heads * head width], in the
/// compute dtype, determines the head width; log_sum_exp fp32 [batch, heads, queries] is saved for backward,
/// the score matrix is not. Keys and values have `time` tokens, and so do the queries unless
/// AttentionOptions::first_query is set. The softmax is computed in fp32. cpu and the fused kernels skip
/// tiles in which no query sees a key. On a CPU the results for a part of the queries have the bits of the
/// whole, except where GEMMs round another number of rows differently.
///
/// cpu: tiles widened to fp32; for bf16 with head widths that are multiples of 32, on CPUs whose bf16 dot
/// products are faster than fp32 (AVX512-BF16 on AMD), bf16 GEMMs with fp32 sums, for which probabilities and
/// the gradient of the scores are rounded to bf16. cuda: for 16-bit dtypes, heads of 64 or 128 elements and
/// no dropout, one fused kernel on tensor cores, which rounds probabilities to the dtype before they multiply
/// the values; otherwise cuBLASLt GEMMs with a softmax between.
///
/// The cost counts the pairs of query and key that the window leaves; documents are unknown before the kernel
/// runs. Throws InvalidArgument when heads does not divide the width of out, key_value_heads does not divide
/// heads, shapes disagree or the workspace has less than attention_workspace_bytes.
void attention_forward(Stream& stream, const AttentionOptions& options, const ConstHeads& query,
                       const ConstHeads& key, const ConstHeads& value, const TensorView& out,
                       const TensorView& log_sum_exp, const Workspace& workspace);

/// d_query, d_key and d_value are written (not added to), other columns of their rows are left unchanged;
/// keys that no query sees get zeros. The gradients of a key and value that a group of heads share are summed
/// in fp32, in the order of the heads. `out` is forward's result.
void attention_backward(Stream& stream, const AttentionOptions& options, const ConstTensorView& d_out,
                        const ConstHeads& query, const ConstHeads& key, const ConstHeads& value,
                        const ConstTensorView& out, const ConstTensorView& log_sum_exp, const Heads& d_query,
                        const Heads& d_key, const Heads& d_value, const Workspace& workspace);

/// The least workspace of forward and backward on any device; a function of the shape only.
/// minimum_workspace_bytes suffices for up to 10^6 tokens and heads of up to 1500 elements.
std::int64_t attention_workspace_bytes(std::int64_t head_width, std::int64_t time);

/// The attention algorithm: "tiles in fp32", "tiles in bf16, sums in fp32", "flash attention on tensor
/// cores", "cuBLASLt GEMMs and softmax". On cuda, tensors that are not aligned to 16 bytes always use the
/// last.
std::string_view attention_path(DeviceKind device, DataType dtype, std::int64_t head_width, float dropout);

}  // namespace tranche::kernels
