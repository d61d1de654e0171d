#pragma once
/// A model of the Llama family against what transformers computed of it (scripts/compare_transformers.py).

#include <string>

namespace tranche::models {

/// Relative differences; those of vectors and matrices in the 2-norm.
struct GoldenDifferences {
  double logits = 0;     ///< the largest, over the largest logit
  double cached = 0;     ///< the same of logits over a key-value cache
  double loss = 0;       ///< of the first step
  double gradients = 0;  ///< of the tensor of which it is largest
  double table = 0;      ///< of the gradient of the token table
  double training = 0;   ///< of the loss of the step of which it is largest
  int generated = 0;     ///< tokens of greedy generation over a key-value cache that are others
  std::string worst_gradient;
  std::string config;  ///< LlamaConfig::to_json() of what was read
};

/// Reads config.json, model.safetensors and golden.safetensors of a folder, and computes logits, loss,
/// gradients and AdamW steps in fp32 on one rank. Where the folder has an adapter of PEFT's, it is the
/// adapter that is trained. Throws Error for a folder that cannot be read or does not
/// fit its model. On a mesh of several ranks with a pipeline, logits and generation are left out; with the axis
/// `context` sequences are padded to whole runs, with targets that are left out.
GoldenDifferences compare_with_golden(const std::string& folder, const std::string& mesh = {}, int ranks = 1);

}  // namespace tranche::models
