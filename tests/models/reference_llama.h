#pragma once
/// The Llama family in fp64: loss and gradient of the sum of losses, on named vectors.

#include <cstdint>
#include <span>

#include "reference_training.h"
#include "tranche/models/llama_config.h"

namespace tranche::reference_training {

/// A batch of rows of `time` tokens, in the form of models::TokenBatch.
struct LlamaRows {
  std::span<const std::int32_t> tokens, targets;
  std::int64_t time = 0;
  std::span<const std::int32_t> document_begin = {}, positions = {};
};

/// Adds to `gradients` if it is not null.
LossSum llama(const models::LlamaConfig& config, const Tensors& weights, const LlamaRows& batch,
              Tensors* gradients);

}  // namespace tranche::reference_training
