#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/cpu/dropout_mask.h"
#include "tranche/core/dtype.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::cpu {

/// Checked operands of kernels::attention_forward and attention_backward; forward leaves the last two null.
struct AttentionCall {
  std::int64_t batch = 0, time = 0, width = 0, heads = 1;
  DataType dtype = DataType::float32;
  const void* query_key_value = nullptr;
  void* out = nullptr;           ///< written by forward, read by backward
  float* log_sum_exp = nullptr;  ///< the same
  const void* d_out = nullptr;
  void* d_query_key_value = nullptr;
  std::optional<DropoutMask> dropout;
  std::vector<std::int64_t> samples;  ///< global sample of each batch entry when there is dropout
  Workspace workspace;
  int threads = 1;

  std::int64_t head_width() const { return width / heads; }
};

/// Scratch that forward and backward need at least for heads of this width. A function of the shape only.
std::int64_t attention_workspace_bytes(std::int64_t head_width);

void attention_forward(const AttentionCall& call);
void attention_backward(const AttentionCall& call);

}  // namespace tranche::kernels::cpu
