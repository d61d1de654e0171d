#pragma once
#include <cstdint>
#include <optional>

#include "kernels/attention_operands.h"
#include "kernels/cpu/dropout_mask.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::cpu {

/// Checked operands of kernels::attention_forward and attention_backward.
struct AttentionCall : AttentionOperands {
  std::optional<DropoutMask> dropout;
  Workspace workspace;
  int threads = 1;
};

/// The least scratch that forward and backward need for heads of this width. A function of the shape only.
std::int64_t attention_workspace_bytes(std::int64_t head_width);

void attention_forward(const AttentionCall& call);
void attention_backward(const AttentionCall& call);

}  // namespace tranche::kernels::cpu
