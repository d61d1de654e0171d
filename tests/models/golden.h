#pragma once
/// Compares a model of the Llama family with results of transformers (scripts/compare_transformers.py).

#include <string>

namespace tranche::models {

/// Relative differences; for vectors and matrices in the 2-norm.
struct GoldenDifferences {
  double logits = 0;     ///< the largest difference, divided by the largest logit
  double cached = 0;     ///< the same for logits with a key-value cache
  double loss = 0;       ///< of the first step
  double gradients = 0;  ///< the largest over the tensors
  double table = 0;      ///< gradient of the token table
  double training = 0;   ///< loss, the largest over the steps
  int generated = 0;     ///< tokens of greedy generation with a key-value cache that differ
  std::string worst_gradient;
  std::string config;  ///< LlamaConfig::to_json() of the model that was read
};

/// Reads config.json, model.safetensors and golden.safetensors of a folder, and computes logits, loss,
/// gradients and AdamW steps in fp32 on one rank. If the folder has a PEFT adapter, the adapter is trained.
/// Throws Error for a folder that cannot be read or does not fit its model. On a mesh of several ranks with a
/// pipeline, logits and generation are left out. With the axis `context` sequences are padded to whole
/// chunks, and the targets of the padding are ignored.
GoldenDifferences compare_with_golden(const std::string& folder, const std::string& mesh = {}, int ranks = 1);

}  // namespace tranche::models
