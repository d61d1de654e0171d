#pragma once
/// GPT and MLP in fp64: loss and gradient of the sum of losses, on named vectors.

#include <functional>
#include <span>

#include "models/mlp.h"
#include "reference_training.h"
#include "tranche/models/gpt_config.h"

namespace tranche::reference_training {

/// The dropout factors of the elements at a site (0 or 1 / (1 - p)); sites are numbered as in
/// models/gpt_block.cpp.
using DropoutMasks = std::function<Tensor(std::uint32_t site, std::int64_t elements)>;

/// tokens and targets are [batch, time]; adds to `gradients` if it is not null. Without `masks` there is no
/// dropout.
LossSum gpt(const models::GptConfig& config, const Tensors& weights, std::span<const std::int32_t> tokens,
            std::span<const std::int32_t> targets, std::int64_t time, Tensors* gradients,
            const DropoutMasks& masks = nullptr);

/// inputs [batch, in]; `values` [batch, out] for squared error, `labels` [batch] for cross-entropy.
LossSum mlp(const models::MlpConfig& config, const Tensors& weights, std::span<const float> inputs,
            std::span<const float> values, std::span<const std::int32_t> labels, Tensors* gradients);

}  // namespace tranche::reference_training
