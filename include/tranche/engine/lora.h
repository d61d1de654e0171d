#pragma once
/// Low-rank adapters (LoRA; Hu et al., 2021) beside the linear layers of a model whose own tensors are
/// frozen.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tranche {

class ModelSpec;
struct TensorSpec;

/// `tranche.lora`. A layer y = x W^T + b becomes y + scale * (dropout(x) A^T) B^T, with A [rank, in] drawn
/// from uniform(-1 / sqrt(in), 1 / sqrt(in)) and B [out, rank] zero, as PEFT does it. Only A and B are
/// trained.
struct LoraConfig {
  std::int64_t rank = 0;     ///< 0: no adapters
  double alpha = 0;          ///< 0: rank
  double dropout = 0;        ///< of the adapters' inputs in training, in [0, 1)
  bool rank_scaled = false;  ///< scale is alpha / sqrt(rank) (rsLoRA; Kalajdzievski, 2023), not alpha / rank
  /// Names of linear layers, or their ends after a dot ("q_proj"), with * and ?; "all-linear": all but the
  /// head.
  std::vector<std::string> targets = {"all-linear"};
  bool save_base = false;  ///< checkpoints hold the frozen tensors too

  bool any() const { return rank > 0; }
  /// True when checkpoints hold adapters alone.
  bool leaves_base_out() const { return any() && !save_base; }
  double effective_alpha() const { return alpha > 0 ? alpha : static_cast<double>(rank); }
  float scale() const;
  /// The problem of values that cannot be, in words; empty: none.
  std::string problem() const;
  friend bool operator==(const LoraConfig&, const LoraConfig&) = default;
};

/// Name of the linear layer that a tensor is the weight of: without ".weight", and that of its first alias
/// where it has any, which is the head of a tied embedding. Empty: it is no linear layer's.
std::string linear_name(const TensorSpec& tensor);
/// Names of an adapter's tensors, as PEFT has them but for its prefix: "h.0.attn.c_attn.lora_A.weight".
std::string adapter_a_name(std::string_view linear);
std::string adapter_b_name(std::string_view linear);

/// The model with adapters, behind the other tensors of their units, and all else frozen; the model itself
/// where `lora` has rank 0. Throws ConfigurationError for values that cannot be, a model that names no linear
/// layers, and a target that matches none, with the closest match.
ModelSpec with_adapters(ModelSpec model, const LoraConfig& lora);

}  // namespace tranche
