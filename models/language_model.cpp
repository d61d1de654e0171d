#include "tranche/models/language_model.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "models/language_head.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/models/weight_gradients.h"

namespace tranche::models {

namespace {

constexpr UnitId embedding{0};
TensorRequest residual_request(const Pass& pass) {
  return {pass.dtype(), {pass.rows(), pass.shape.width}};
}

StepTensors acquire_residual(const Pass& pass, std::string_view tag) {
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
void forward_block(const LanguageModel& model, const Pass& pass, SavedActivations& saved, std::size_t i,
                   const GatheredUnit& unit, const TensorView& input, bool save) {
  StepTensors activations = model.acquire_block_activations(pass);
  if (!saved.residuals[i + 1].held()) saved.residuals[i + 1] = acquire_residual(pass, "residual");
  const auto block = static_cast<std::int64_t>(i);
  model.block_forward(pass, block, unit, input, activations, &saved.residuals[i + 1][0]);
  if (save) saved.activations[i] = std::move(activations);
}

/// Recomputes the activations of block `i` from its checkpoint, and nothing that only the next block needs.
void recompute_block(const LanguageModel& model, const Pass& pass, SavedActivations& saved, std::size_t i,
                     const GatheredUnit& unit) {
  saved.activations[i] = model.acquire_block_activations(pass);
  model.block_forward(pass, static_cast<std::int64_t>(i), unit, saved.residuals[i][0], saved.activations[i],
                      nullptr);
}

/// Embedding and all blocks. `save_every` 0 saves nothing but the last output, 1 everything that backward
/// reads; with `inputs_only` only the inputs of blocks 0, save_every, 2 save_every ... are saved.
void forward_blocks(const LanguageModel& model, const Pass& pass, const ConstTensorView& tokens,
                    SavedActivations& saved, std::int64_t save_every, bool inputs_only) {
  Engine& engine = pass.engine;
  saved.residuals[0] = acquire_residual(pass, "residual");
  model.embedding_forward(pass, engine.gather(embedding), tokens, saved.residuals[0][0]);
  for (std::size_t i = 0; i < saved.activations.size(); ++i) {
    const auto block = static_cast<std::int64_t>(i);
    const bool saves = save_every > 0 && block % save_every == 0;
    const TensorView input = saved.residuals[i][0];
    // The copy to the host runs while the block reads the input; the memory is free behind both.
    if (saves && inputs_only) {
      saved.inputs[i] = engine.send_to_host(saved.residuals[i].take(), "block input");
    }
    forward_block(model, pass, saved, i, engine.gather(model.unit_of_block(block)), input,
                  save_every > 0 && !inputs_only);
    saved.inputs[i].leave_device();
    if (!saves) saved.residuals[i].release();
  }
}

/// Starts the copy back of the checkpoint of the group of blocks that ends before block `end`.
void prefetch_input(const Pass& pass, SavedActivations& saved, std::int64_t save_every, std::int64_t end) {
  if (end == 0 || !pass.engine.config().overlap) return;
  const std::int64_t begin = (end - 1) / save_every * save_every;
  pass.engine.prefetch_from_host(saved.inputs[static_cast<std::size_t>(begin)]);
}

/// Puts the checkpoint of block `i` back into the residuals, on the device.
void fetch_input(const Pass& pass, SavedActivations& saved, std::size_t i) {
  saved.residuals[i] =
      StepTensors(pass.engine.fetch_from_host(std::move(saved.inputs[i])), {residual_request(pass)});
}

/// A group of blocks that are recomputed together stays gathered from its recomputation to its backward when
/// that many units may be gathered at once; otherwise all but its last block are gathered once more.
bool group_stays_gathered(const Config& config, std::int64_t blocks) {
  return blocks <= config.depth;
}

void backward_blocks(const LanguageModel& model, const Pass& pass, SavedActivations& saved,
                     std::int64_t save_every, bool recompute, const TensorView& gradient) {
  Engine& engine = pass.engine;
  std::vector<GatheredUnit> held;
  for (std::int64_t end = pass.shape.layers; end > 0;) {
    const std::int64_t begin = (end - 1) / save_every * save_every;
    const bool stays_gathered = group_stays_gathered(engine.config(), end - begin);
    if (recompute) {
      fetch_input(pass, saved, static_cast<std::size_t>(begin));
      prefetch_input(pass, saved, save_every, begin);
    }
    for (std::int64_t block = begin; recompute && block < end - 1; ++block) {
      GatheredUnit unit = engine.gather(model.unit_of_block(block));
      const auto i = static_cast<std::size_t>(block);
      forward_block(model, pass, saved, i, unit, saved.residuals[i][0], true);
      if (stays_gathered) held.push_back(std::move(unit));
    }
    for (std::int64_t block = end - 1; block >= begin; --block) {
      const auto i = static_cast<std::size_t>(block);
      const bool last = block == end - 1;
      const GatheredUnit unit =
          held.empty() || last ? engine.gather(model.unit_of_block(block)) : std::move(held.back());
      if (!last && !held.empty()) held.pop_back();
      if (recompute && last) recompute_block(model, pass, saved, i, unit);
      UnitGradients gradients = engine.gradients(model.unit_of_block(block));
      WeightGradients weights(gradients);
      model.block_backward(pass, block, unit, weights, saved.residuals[i][0], saved.activations[i], gradient);
      std::move(gradients).reduce();
      saved.activations[i].release();
      saved.residuals[i].release();
    }
    end = begin;
  }
}

void require_places(const std::optional<ConstTensorView>& view, const Shape& tokens, std::string_view what,
                    const LanguageModel& model) {
  if (!view) return;
  if (!model.takes_documents()) {
    throw InvalidArgument(fmt::format(
        "{} were given, but {} cannot use them: it takes a row as one document from position 0 on", what,
        model.architecture()));
  }
  if (view->dtype != DataType::int32 || !(view->shape == tokens)) {
    throw InvalidArgument(fmt::format("{} must be int32 {} as the tokens are, not {} {}", what,
                                      tokens.to_string(), name_of(view->dtype), view->shape.to_string()));
  }
}

/// What the sizes of a micro-batch's buffers follow from.
Shape shape_of(const Pass& pass) {
  return {pass.batch, pass.time, pass.document_begin ? 1 : 0, pass.positions ? 1 : 0};
}

}  // namespace

DataType Pass::dtype() const {
  return engine.config().precision.compute;
}

kernels::DropoutOptions Pass::dropout(float probability, std::uint32_t site) const {
  return {.probability = training ? probability : 0.0f,
          .seed = engine.config().seed,
          .step = static_cast<std::uint64_t>(engine.steps()),
          .site = site,
          .samples = samples};
}

double LanguageModel::flops_per_token(std::int64_t sequence) const {
  const ModelShape sizes = shape();
  return 3 * static_cast<double>(sizes.layers) * block_operations(sequence) +
         6 * static_cast<double>(sizes.vocabulary) * static_cast<double>(sizes.width);
}

void LanguageModel::require_sequence(std::int64_t sequence) const {
  const std::int64_t positions = shape().positions;
  if (sequence >= 1 && sequence <= positions) return;
  throw ConfigurationError(
      fmt::format("sequence length {} is not in 1..{}: the model has {} positions; shorten the sequence or "
                  "change the model",
                  sequence, positions, positions));
}

UnitSpec LanguageModel::head_unit() const {
  throw InvalidArgument(fmt::format("{} has no head of its own", architecture()));
}

UnitId LanguageModel::unit_of_block(std::int64_t block) const {
  return {narrow<int>(block + 1)};
}

UnitId LanguageModel::unit_of_head() const {
  const ModelShape sizes = shape();
  return sizes.tied_head ? embedding : unit_of_block(sizes.layers);
}

ModelSpec LanguageModel::spec(std::int64_t sequence) const {
  require_sequence(sequence);
  const std::int64_t layers = shape().layers;
  const bool tied = shape().tied_head;
  ModelSpec spec;
  spec.add_unit(embedding_unit());
  for (std::int64_t block = 0; block < layers; ++block) spec.add_unit(block_unit(block));
  if (!tied) spec.add_unit(head_unit());
  spec.gathers_per_micro_batch = [layers, tied](const Config& training) {
    // The embedding by the embedding and, if tied, by the head; a block by its forward and by its backward.
    std::vector<int> gathers(static_cast<std::size_t>(layers) + 1, 2);
    const std::int64_t every = training.checkpoint_every;
    for (std::int64_t block = 0; training.activation_checkpointing && block < layers; ++block) {
      const std::int64_t begin = block / every * every, end = std::min(begin + every, layers);
      if (block + 1 < end && !group_stays_gathered(training, end - begin))
        ++gathers[static_cast<std::size_t>(block) + 1];
    }
    if (!tied) {
      gathers.front() = 1;
      gathers.push_back(1);
    }
    return gathers;
  };
  spec.tokens_per_sample = sequence;
  spec.flops_per_token = flops_per_token(sequence);
  spec.recomputes_activations = true;
  return spec;
}

Pass LanguageModel::pass_of(Engine& engine, const TokenBatch& batch, bool training) const {
  const Shape& tokens = batch.tokens.shape;
  if (tokens.rank() != 2 || batch.tokens.dtype != DataType::int32) {
    throw InvalidArgument(fmt::format("tokens must be int32 [batch, time], not {} {}",
                                      name_of(batch.tokens.dtype), tokens.to_string()));
  }
  if (batch.targets.dtype != DataType::int32 || !(batch.targets.shape == tokens)) {
    throw InvalidArgument(fmt::format("targets must be int32 {} as the tokens are, not {} {}",
                                      tokens.to_string(), name_of(batch.targets.dtype),
                                      batch.targets.shape.to_string()));
  }
  require_places(batch.document_begin, tokens, "document boundaries", *this);
  require_places(batch.positions, tokens, "positions", *this);
  if (static_cast<std::int64_t>(batch.samples.size()) != tokens[0]) {
    throw InvalidArgument(
        fmt::format("{} sample indices were given for {} sequences", batch.samples.size(), tokens[0]));
  }
  require_sequence(tokens[1]);
  const ModelShape sizes = shape();
  const std::int64_t units = sizes.layers + (sizes.tied_head ? 1 : 2);
  if (engine.model().units().size() != static_cast<std::size_t>(units)) {
    throw InvalidArgument(
        fmt::format("the engine holds {} units, but this model of {} has {}: make it with the model's spec()",
                    engine.model().units().size(), architecture(), units));
  }
  return {.engine = engine,
          .shape = sizes,
          .batch = tokens[0],
          .time = tokens[1],
          .samples = batch.samples,
          .training = training,
          .document_begin = batch.document_begin,
          .positions = batch.positions};
}

void LanguageModel::forward_backward(Engine& engine, const TokenBatch& batch) const {
  Pass pass = pass_of(engine, batch, true);
  const bool recompute = engine.config().activation_checkpointing;
  const std::int64_t save_every = recompute ? std::max(engine.config().checkpoint_every, 1) : 1;

  engine.begin_micro_batch(shape_of(pass), batch.samples);
  const StepTensors totals = acquire_totals(engine);
  pass.tables = acquire_tables(pass);
  SavedActivations saved(pass.shape.layers);
  forward_blocks(*this, pass, batch.tokens, saved, save_every, recompute);

  if (recompute) prefetch_input(pass, saved, save_every, pass.shape.layers);
  StepTensors gradient = acquire_residual(pass, "residual gradient");
  {
    const GatheredUnit unit = engine.gather(unit_of_head());
    UnitGradients gradients = engine.gradients(unit_of_head());
    language_head(*this, pass, unit, &gradients, saved.residuals.back()[0], batch.targets, totals[0],
                  totals[1], &gradient[0]);
    std::move(gradients).reduce();
  }
  saved.residuals.back().release();
  backward_blocks(*this, pass, saved, save_every, recompute, gradient[0]);
  UnitGradients gradients = engine.gradients(embedding);
  embedding_backward(pass, gradients, batch.tokens, gradient[0]);
  std::move(gradients).reduce();
  gradient.release();
  engine.end_micro_batch(totals[0], totals[1]);
}

void LanguageModel::evaluate(Engine& engine, const TokenBatch& batch) const {
  Pass pass = pass_of(engine, batch, false);
  engine.begin_micro_batch(shape_of(pass), batch.samples);
  const StepTensors totals = acquire_totals(engine);
  pass.tables = acquire_tables(pass);
  SavedActivations saved(pass.shape.layers);
  forward_blocks(*this, pass, batch.tokens, saved, 0, false);
  language_head(*this, pass, engine.gather(unit_of_head()), nullptr, saved.residuals.back()[0], batch.targets,
                totals[0], totals[1], nullptr);
  saved.residuals.back().release();
  engine.end_micro_batch(totals[0], totals[1]);
}

}  // namespace tranche::models
