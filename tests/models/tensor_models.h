#pragma once
/// Models and configurations for tests of the axis `tensor`, and bounds for their differences from runs of
/// one rank.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tiny_llama.h"
#include "training_fixture.h"

namespace tranche::models {

/// 5 samples of 11 tokens: two, three or four ranks cannot share the rows evenly.
inline constexpr std::int64_t time_steps = 11, batch = 5;

/// Six heads, and an inner width and a vocabulary that three ranks cannot share evenly.
inline GptConfig six_heads() {
  GptConfig model = tiny_gpt();
  model.heads = 6;
  model.inner = 50;
  return model;
}

inline GptConfig with_dropout(GptConfig model) {
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1f;
  return model;
}

inline LlamaConfig eight_heads(LlamaKind kind) {
  LlamaConfig model = tiny_llama(kind);
  model.heads = 8;
  model.key_value_heads = 2;
  model.attention_dropout = 0.1f;
  return model;
}

/// With weight decay and clipping; `data_ranks` ranks share 5 samples (or 10).
inline Config config_of(int tensor, int data_ranks = 1, int stage = 0) {
  Config config = plain_config(batch * data_ranks, data_ranks);
  config.gradient_clipping = 0.5;
  config.optimizer.learning_rate = 2e-3;
  config.optimizer.parameters["weight_decay"] = 0.1;
  config.stage = stage;
  if (tensor > 1) config.mesh = (data_ranks > 1 ? "shard=2,tensor=" : "tensor=") + std::to_string(tensor);
  return config;
}

inline double largest_relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0 : 1e9;
  for (std::size_t i = 0; i < b.size() && i < a.size(); ++i) {
    largest = std::max(largest, std::abs(a[i] - b[i]) / std::abs(b[i]));
  }
  return largest;
}

inline void expect_equal_runs(const GptRun& actual, const GptRun& wanted) {
  EXPECT_LE(largest_relative_difference(actual.losses, wanted.losses), 1e-5);
  EXPECT_LE(largest_relative_difference(actual.norms, wanted.norms), 1e-5);
}

}  // namespace tranche::models
