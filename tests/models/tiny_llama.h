#pragma once
/// Models of the Llama family that are small enough for steps of milliseconds.

#include "tranche/models/llama_config.h"

namespace tranche::models {

/// Sizes that are not multiples of a vector, with every feature of the architecture.
inline LlamaConfig tiny_llama(LlamaKind kind) {
  LlamaConfig config = LlamaConfig::preset("qwen3-nano");
  config.kind = kind;
  config.vocabulary = 61;
  config.positions = 32;
  config.inner = 37;
  config.head_dim = 6;
  config.tied = kind == LlamaKind::qwen3;
  config.rope_theta = 100;
  if (kind == LlamaKind::llama) {
    config.attention_bias = config.mlp_bias = true;
    config.rope = {.kind = kernels::RopeScaling::Kind::llama3, .factor = 8, .original_positions = 8};
  }
  if (kind == LlamaKind::mistral) config.window = 4;
  if (kind == LlamaKind::qwen2) {
    config.window = 3;
    config.windowed = {false, true};
    config.rope = {.kind = kernels::RopeScaling::Kind::linear, .factor = 2};
  }
  return config;
}

inline constexpr LlamaKind all_kinds[] = {LlamaKind::llama, LlamaKind::mistral, LlamaKind::qwen2,
                                          LlamaKind::qwen3};

}  // namespace tranche::models
