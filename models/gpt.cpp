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

/// Activations saved for backward: at index i the input of block i and its activations, where saved; at index
/// `layers` the last block's output. `inputs` holds activation checkpoints, the inputs that recomputation
/// starts from, in host memory if Config::offload.activations asks for it.
struct SavedActivations {
  std::vector<StepTensors> residuals;
  std::vector<StepTensors> activations;
  std::vector<HostCopy> inputs;
  explicit SavedActivations(std::int64_t layers)
      : residuals(static_cast<std::size_t>(layers) + 1),
        activations(static_cast<std::size_t>(layers)),
        inputs(static_cast<std::size_t>(layers)) {}
};

/// Computes block `i` from its input; writes the input of the next.
void forward_block(const GptPass& pass, SavedActivations& saved, std::size_t i, const GatheredUnit& unit,
                   const TensorView& input, bool save) {
  StepTensors activations = acquire_block_activations(pass);
  if (!saved.residuals[i + 1].held()) saved.residuals[i + 1] = acquire_residual(pass, "residual");
  const auto block = static_cast<std::int64_t>(i);
  gpt_block_forward(pass, block, unit, input, activations, &saved.residuals[i + 1][0]);
  if (save) saved.activations[i] = std::move(activations);
}

/// Recomputes the activations of block `i` from its checkpoint, and nothing that only the next block needs.
void recompute_block(const GptPass& pass, SavedActivations& saved, std::size_t i, const GatheredUnit& unit) {
  saved.activations[i] = acquire_block_activations(pass);
  gpt_block_forward(pass, static_cast<std::int64_t>(i), unit, saved.residuals[i][0], saved.activations[i],
                    nullptr);
}

/// Embedding and all blocks. `save_every` 0 saves nothing but the last output, 1 everything that backward
/// reads; with `inputs_only` only the inputs of blocks 0, save_every, 2 save_every ... are saved.
void forward_blocks(const GptPass& pass, const ConstTensorView& tokens, SavedActivations& saved,
                    std::int64_t save_every, bool inputs_only) {
  Engine& engine = pass.engine;
  saved.residuals[0] = acquire_residual(pass, "residual");
  gpt_embedding_forward(pass, engine.gather(embedding), tokens, saved.residuals[0][0]);
  for (std::size_t i = 0; i < saved.activations.size(); ++i) {
    const auto block = static_cast<std::int64_t>(i);
    const bool saves = save_every > 0 && block % save_every == 0;
    const TensorView input = saved.residuals[i][0];
    // The copy to the host runs while the block reads the input; the memory is free behind both.
    if (saves && inputs_only) {
      saved.inputs[i] = engine.send_to_host(saved.residuals[i].take(), "block input");
    }
    forward_block(pass, saved, i, engine.gather(unit_of(block)), input, save_every > 0 && !inputs_only);
    saved.inputs[i].leave_device();
    if (!saves) saved.residuals[i].release();
  }
}

/// Starts the copy back of the checkpoint of the group of blocks that ends before block `end`.
void prefetch_input(const GptPass& pass, SavedActivations& saved, std::int64_t save_every, std::int64_t end) {
  if (end == 0 || !pass.engine.config().overlap) return;
  const std::int64_t begin = (end - 1) / save_every * save_every;
  pass.engine.prefetch_from_host(saved.inputs[static_cast<std::size_t>(begin)]);
}

/// Puts the checkpoint of block `i` back into the residuals, on the device.
void fetch_input(const GptPass& pass, SavedActivations& saved, std::size_t i) {
  saved.residuals[i] =
      StepTensors(pass.engine.fetch_from_host(std::move(saved.inputs[i])), {residual_request(pass)});
}

/// A group of blocks that are recomputed together stays gathered from its recomputation to its backward when
/// that many units may be gathered at once; otherwise all but its last block are gathered once more.
bool group_stays_gathered(const Config& config, std::int64_t blocks) {
  return blocks <= config.depth;
}

void backward_blocks(const GptPass& pass, SavedActivations& saved, std::int64_t save_every, bool recompute,
                     const TensorView& gradient) {
  Engine& engine = pass.engine;
  std::vector<GatheredUnit> held;
  for (std::int64_t end = pass.config.layers; end > 0;) {
    const std::int64_t begin = (end - 1) / save_every * save_every;
    const bool stays_gathered = group_stays_gathered(engine.config(), end - begin);
    if (recompute) {
      fetch_input(pass, saved, static_cast<std::size_t>(begin));
      prefetch_input(pass, saved, save_every, begin);
    }
    for (std::int64_t block = begin; recompute && block < end - 1; ++block) {
      GatheredUnit unit = engine.gather(unit_of(block));
      const auto i = static_cast<std::size_t>(block);
      forward_block(pass, saved, i, unit, saved.residuals[i][0], true);
      if (stays_gathered) held.push_back(std::move(unit));
    }
    for (std::int64_t block = end - 1; block >= begin; --block) {
      const auto i = static_cast<std::size_t>(block);
      const bool last = block == end - 1;
      const GatheredUnit unit = held.empty() || last ? engine.gather(unit_of(block)) : std::move(held.back());
      if (!last && !held.empty()) held.pop_back();
      if (recompute && last) recompute_block(pass, saved, i, unit);
      UnitGradients gradients = engine.gradients(unit_of(block));
      gpt_block_backward(pass, block, unit, gradients, saved.residuals[i][0], saved.activations[i], gradient);
      std::move(gradients).reduce();
      saved.activations[i].release();
      saved.residuals[i].release();
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
  spec.gathers_per_micro_batch = [layers = config.layers](const Config& training) {
    // The embedding by the embedding and by the head, a block by its forward and by its backward.
    std::vector<int> gathers(static_cast<std::size_t>(layers) + 1, 2);
    const std::int64_t every = training.checkpoint_every;
    for (std::int64_t block = 0; training.activation_checkpointing && block < layers; ++block) {
      const std::int64_t begin = block / every * every, end = std::min(begin + every, layers);
      if (block + 1 < end && !group_stays_gathered(training, end - begin))
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
  const std::int64_t save_every = recompute ? std::max(engine.config().checkpoint_every, 1) : 1;

  engine.begin_micro_batch();
  const StepTensors totals = acquire_totals(engine);
  SavedActivations saved(config_.layers);
  forward_blocks(pass, batch.tokens, saved, save_every, recompute);

  if (recompute) prefetch_input(pass, saved, save_every, config_.layers);
  StepTensors gradient = acquire_residual(pass, "residual gradient");
  {
    const GatheredUnit unit = engine.gather(embedding);
    UnitGradients gradients = engine.gradients(embedding);
    gpt_head(pass, unit, &gradients, saved.residuals.back()[0], batch.targets, totals[0], totals[1],
             &gradient[0]);
    std::move(gradients).reduce();
  }
  saved.residuals.back().release();
  backward_blocks(pass, saved, save_every, recompute, gradient[0]);
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
  SavedActivations saved(config_.layers);
  forward_blocks(pass, batch.tokens, saved, 0, false);
  gpt_head(pass, engine.gather(embedding), nullptr, saved.residuals.back()[0], batch.targets, totals[0],
           totals[1], nullptr);
  saved.residuals.back().release();
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
  SavedActivations saved(config_.layers);
  forward_blocks(pass, batch.tokens, saved, 0, false);
  const StepTensors logits(engine, Category::activations, "next token's logits",
                           {{DataType::float32, {1, config_.vocabulary}}});
  gpt_logits(pass, engine.gather(embedding), saved.residuals.back()[0], seen - 1, 1, logits[0]);
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
