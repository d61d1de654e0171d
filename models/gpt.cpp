#include "tranche/models/gpt.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "models/gpt_block.h"
#include "models/gpt_head.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"

namespace tranche::models {

namespace {

constexpr UnitId embedding{0};
UnitId unit_of(std::int64_t block) {
  return {narrow<int>(block + 1)};
}

TensorRequest residual_request(const GptPass& pass) {
  return {pass.dtype(), {pass.rows(), pass.config.width}};
}

StepTensors acquire_residual(const GptPass& pass, std::string_view tag) {
  return {pass.engine, Category::activations, tag, {residual_request(pass)}};
}

/// Loss and token count of the micro-batch, zero.
StepTensors acquire_totals(Engine& engine) {
  StepTensors totals(engine, Category::activations, "loss and tokens",
                     {{DataType::float64, {}}, {DataType::int64, {}}});
  kernels::fill_zero(engine.compute_stream(), totals[0]);
  kernels::fill_zero(engine.compute_stream(), totals[1]);
  return totals;
}

/// The saved activations of the blocks: at index i the input of block i and its activations, where kept; at
/// index `layers` the last block's output. Inputs that recomputation starts from wait in `inputs`, in host
/// memory where that is asked for.
struct Trail {
  std::vector<StepTensors> residuals;
  std::vector<StepTensors> activations;
  std::vector<HostCopy> inputs;
  explicit Trail(std::int64_t layers)
      : residuals(static_cast<std::size_t>(layers) + 1),
        activations(static_cast<std::size_t>(layers)),
        inputs(static_cast<std::size_t>(layers)) {}
};

/// Computes block `i` from its input; writes the input of the next.
void forward_block(const GptPass& pass, Trail& trail, std::size_t i, const GatheredUnit& unit,
                   const TensorView& input, bool keep) {
  StepTensors activations = acquire_block_activations(pass);
  if (!trail.residuals[i + 1].held()) trail.residuals[i + 1] = acquire_residual(pass, "residual");
  const auto block = static_cast<std::int64_t>(i);
  gpt_block_forward(pass, block, unit, input, activations, &trail.residuals[i + 1][0]);
  if (keep) trail.activations[i] = std::move(activations);
}

/// Computes the activations of block `i` again from its kept input, and nothing that only the next block
/// needs.
void recompute_block(const GptPass& pass, Trail& trail, std::size_t i, const GatheredUnit& unit) {
  trail.activations[i] = acquire_block_activations(pass);
  gpt_block_forward(pass, static_cast<std::int64_t>(i), unit, trail.residuals[i][0], trail.activations[i],
                    nullptr);
}

/// Embedding and all blocks. `keep_every` 0 keeps nothing but the last output, 1 everything that backward
/// reads; with `inputs_only` only the inputs of blocks 0, keep_every, 2 keep_every ... are kept.
void forward_blocks(const GptPass& pass, const ConstTensorView& tokens, Trail& trail, std::int64_t keep_every,
                    bool inputs_only) {
  Engine& engine = pass.engine;
  trail.residuals[0] = acquire_residual(pass, "residual");
  gpt_embedding_forward(pass, engine.gather(embedding), tokens, trail.residuals[0][0]);
  for (std::size_t i = 0; i < trail.activations.size(); ++i) {
    const auto block = static_cast<std::int64_t>(i);
    const bool kept = keep_every > 0 && block % keep_every == 0;
    const TensorView input = trail.residuals[i][0];
    // It leaves while the block reads it, and its memory is free behind both.
    if (kept && inputs_only) {
      trail.inputs[i] = engine.send_to_host(trail.residuals[i].take(), "block input");
    }
    forward_block(pass, trail, i, engine.gather(unit_of(block)), input, keep_every > 0 && !inputs_only);
    trail.inputs[i].leave_device();
    if (!kept) trail.residuals[i].release();
  }
}

/// The kept input of the group of blocks that ends before block `end` starts its way back, if it is away.
void fetch_input_ahead(const GptPass& pass, Trail& trail, std::int64_t keep_every, std::int64_t end) {
  if (end == 0 || !pass.engine.config().overlap) return;
  const std::int64_t begin = (end - 1) / keep_every * keep_every;
  pass.engine.prefetch(trail.inputs[static_cast<std::size_t>(begin)]);
}

/// The kept input of block `i` is on the device again.
void bring_input_back(const GptPass& pass, Trail& trail, std::size_t i) {
  trail.residuals[i] = StepTensors(pass.engine.restore(std::move(trail.inputs[i])), {residual_request(pass)});
}

/// A group of blocks that are recomputed together stays gathered from its recomputation to its backward when
/// that many units may be gathered at once; otherwise all but its last block are gathered once more.
bool group_stays(const Config& config, std::int64_t blocks) {
  return blocks <= config.depth;
}

void backward_blocks(const GptPass& pass, Trail& trail, std::int64_t keep_every, bool recompute,
                     const TensorView& gradient) {
  Engine& engine = pass.engine;
  std::vector<GatheredUnit> held;
  for (std::int64_t end = pass.config.layers; end > 0;) {
    const std::int64_t begin = (end - 1) / keep_every * keep_every;
    const bool stays = group_stays(engine.config(), end - begin);
    if (recompute) {
      bring_input_back(pass, trail, static_cast<std::size_t>(begin));
      fetch_input_ahead(pass, trail, keep_every, begin);
    }
    for (std::int64_t block = begin; recompute && block < end - 1; ++block) {
      GatheredUnit unit = engine.gather(unit_of(block));
      const auto i = static_cast<std::size_t>(block);
      forward_block(pass, trail, i, unit, trail.residuals[i][0], true);
      if (stays) held.push_back(std::move(unit));
    }
    for (std::int64_t block = end - 1; block >= begin; --block) {
      const auto i = static_cast<std::size_t>(block);
      const bool last = block == end - 1;
      const GatheredUnit unit = held.empty() || last ? engine.gather(unit_of(block)) : std::move(held.back());
      if (!last && !held.empty()) held.pop_back();
      if (recompute && last) recompute_block(pass, trail, i, unit);
      UnitGradients gradients = engine.gradients(unit_of(block));
      gpt_block_backward(pass, block, unit, gradients, trail.residuals[i][0], trail.activations[i], gradient);
      std::move(gradients).reduce();
      trail.activations[i].release();
      trail.residuals[i].release();
    }
    end = begin;
  }
}

GptPass make_pass(Engine& engine, const GptConfig& config, const TokenBatch& batch, bool training) {
  if (batch.tokens.shape.rank() != 2 || batch.tokens.dtype != DataType::int32) {
    throw InvalidArgument(fmt::format("tokens must be int32 [batch, time], not {} {}",
                                      name_of(batch.tokens.dtype), batch.tokens.shape.to_string()));
  }
  if (batch.targets.dtype != DataType::int32 || !(batch.targets.shape == batch.tokens.shape)) {
    throw InvalidArgument(fmt::format("targets must be int32 {} as the tokens are, not {} {}",
                                      batch.tokens.shape.to_string(), name_of(batch.targets.dtype),
                                      batch.targets.shape.to_string()));
  }
  const std::int64_t sequences = batch.tokens.shape[0];
  if (static_cast<std::int64_t>(batch.samples.size()) != sequences) {
    throw InvalidArgument(
        fmt::format("{} sample indices were given for {} sequences", batch.samples.size(), sequences));
  }
  config.require_sequence(batch.tokens.shape[1]);
  if (engine.model().units().size() != static_cast<std::size_t>(config.layers) + 1) {
    throw InvalidArgument(
        fmt::format("the engine holds {} units, but this GPT has {}: make it with Gpt::spec()",
                    engine.model().units().size(), config.layers + 1));
  }
  return {engine, config, sequences, batch.tokens.shape[1], batch.samples, training};
}

}  // namespace

Gpt::Gpt(GptConfig config) : config_(config) {
  config_.validate("model configuration");
}

ModelSpec Gpt::spec(const GptConfig& config, std::int64_t sequence) {
  config.validate("model configuration");
  config.require_sequence(sequence);
  ModelSpec spec;
  spec.add_unit(gpt_embedding_unit(config));
  for (std::int64_t block = 0; block < config.layers; ++block) spec.add_unit(gpt_block_unit(config, block));
  spec.gathers_per_pass = [layers = config.layers](const Config& training) {
    // The embedding by the embedding and by the head, a block by its forward and by its backward.
    std::vector<int> gathers(static_cast<std::size_t>(layers) + 1, 2);
    const std::int64_t every = training.checkpoint_every;
    for (std::int64_t block = 0; training.activation_checkpointing && block < layers; ++block) {
      const std::int64_t begin = block / every * every, end = std::min(begin + every, layers);
      if (block + 1 < end && !group_stays(training, end - begin))
        ++gathers[static_cast<std::size_t>(block) + 1];
    }
    return gathers;
  };
  spec.tokens_per_sample = sequence;
  spec.flops_per_token = config.flops_per_token(sequence);
  spec.recomputes_activations = true;
  return spec;
}

void Gpt::forward_backward(Engine& engine, const TokenBatch& batch) const {
  const GptPass pass = make_pass(engine, config_, batch, true);
  const bool recompute = engine.config().activation_checkpointing;
  const std::int64_t keep_every = recompute ? std::max(engine.config().checkpoint_every, 1) : 1;

  engine.begin_micro_batch();
  const StepTensors totals = acquire_totals(engine);
  Trail trail(config_.layers);
  forward_blocks(pass, batch.tokens, trail, keep_every, recompute);

  if (recompute) fetch_input_ahead(pass, trail, keep_every, config_.layers);
  StepTensors gradient = acquire_residual(pass, "residual gradient");
  {
    const GatheredUnit unit = engine.gather(embedding);
    UnitGradients gradients = engine.gradients(embedding);
    gpt_head(pass, unit, &gradients, trail.residuals.back()[0], batch.targets, totals[0], totals[1],
             &gradient[0]);
    std::move(gradients).reduce();
  }
  trail.residuals.back().release();
  backward_blocks(pass, trail, keep_every, recompute, gradient[0]);
  UnitGradients gradients = engine.gradients(embedding);
  gpt_embedding_backward(pass, gradients, batch.tokens, gradient[0]);
  std::move(gradients).reduce();
  gradient.release();
  engine.end_micro_batch(totals[0], totals[1]);
}

void Gpt::evaluate(Engine& engine, const TokenBatch& batch) const {
  const GptPass pass = make_pass(engine, config_, batch, false);
  engine.begin_micro_batch();
  const StepTensors totals = acquire_totals(engine);
  Trail trail(config_.layers);
  forward_blocks(pass, batch.tokens, trail, 0, false);
  gpt_head(pass, engine.gather(embedding), nullptr, trail.residuals.back()[0], batch.targets, totals[0],
           totals[1], nullptr);
  trail.residuals.back().release();
  engine.end_micro_batch(totals[0], totals[1]);
}

std::vector<float> Gpt::next_token_logits(Engine& engine, std::span<const std::int32_t> tokens) const {
  if (tokens.empty()) throw InvalidArgument("no tokens were given to continue; give at least one");
  const auto seen = std::min(static_cast<std::int64_t>(tokens.size()), config_.positions);
  tokens = tokens.last(static_cast<std::size_t>(seen));
  for (const auto token : tokens) {
    if (token < 0 || token >= config_.vocabulary) {
      throw InvalidArgument(
          fmt::format("token {} is not in the vocabulary of {}", token, config_.vocabulary));
    }
  }
  std::vector<float> result(static_cast<std::size_t>(config_.vocabulary));
  Stream& stream = engine.compute_stream();
  const InferenceScope scope(engine);
  const StepTensors device_tokens(engine, Category::activations, "prompt", {{DataType::int32, {1, seen}}});
  engine.device().copy_from_host(stream, device_tokens[0].data, tokens.data(), device_tokens[0].bytes());
  const std::int64_t sample = 0;
  const TokenBatch batch{device_tokens[0], device_tokens[0], {&sample, 1}};
  const GptPass pass = make_pass(engine, config_, batch, false);
  Trail trail(config_.layers);
  forward_blocks(pass, batch.tokens, trail, 0, false);
  const StepTensors logits(engine, Category::activations, "next token's logits",
                           {{DataType::float32, {1, config_.vocabulary}}});
  gpt_logits(pass, engine.gather(embedding), trail.residuals.back()[0], seen - 1, 1, logits[0]);
  engine.device().copy_to_host(stream, result.data(), logits[0].data, logits[0].bytes());
  stream.synchronize();
  return result;
}

std::vector<double> Gpt::next_token_probabilities(Engine& engine, std::span<const std::int32_t> tokens,
                                                  double temperature) const {
  if (!(temperature > 0)) {
    throw InvalidArgument(fmt::format("temperature is {}, but must be positive", temperature));
  }
  const std::vector<float> logits = next_token_logits(engine, tokens);
  const double highest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> probabilities(logits.size());
  double sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    probabilities[i] = std::exp((logits[i] - highest) / temperature);
    sum += probabilities[i];
  }
  for (auto& p : probabilities) p /= sum;
  return probabilities;
}

}  // namespace tranche::models
