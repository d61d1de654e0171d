#pragma once
/// The choice of low-rank adapters (LoRA; Hu et al., 2021); tranche/engine/lora.h adds them to a model.

#include <cstdint>
#include <string>
#include <vector>

namespace tranche {

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
  /// Describes values that are invalid; empty: none are.
  std::string problem() const;
  friend bool operator==(const LoraConfig&, const LoraConfig&) = default;
};

}  // namespace tranche
