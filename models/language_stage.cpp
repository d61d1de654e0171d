#include "models/language_stage.h"

#include <algorithm>
#include <utility>

#include "models/language_head.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/models/weight_gradients.h"

namespace tranche::models {

namespace {

TensorRequest residual_request(const Pass& pass) {
  return {pass.dtype(), {pass.local_rows(), pass.shape.width}};
}

StepTensors acquire_residual(const Pass& pass, std::string_view tag) {
  return {pass.engine, Category::activations, tag, {residual_request(pass)}};
}

/// The micro-batch's loss and token count, initially zero.
StepTensors acquire_totals(Engine& engine) {
  StepTensors totals(engine, Category::activations, "loss and tokens",
                     {{DataType::float64, {}}, {DataType::int64, {}}});
  kernels::fill_zero(engine.compute_stream(), totals[0]);
  kernels::fill_zero(engine.compute_stream(), totals[1]);
  return totals;
}

/// The numbers that determine the sizes of a micro-batch's buffers.
Shape shape_of(const Pass& pass) {
  return {pass.batch, pass.time, pass.sequence, pass.document_begin ? 1 : 0, pass.positions ? 1 : 0};
}

}  // namespace

bool group_stays_gathered(const Config& config, std::int64_t blocks) {
  return blocks <= config.depth;
}

BlockRange blocks_of_chunk(const Engine::Chunk& chunk, std::int64_t layers) {
  // Without a pipeline ModelSpec::forward need not be set.
  if (chunk.chunks == 1) return {0, layers};
  return {std::clamp<std::int64_t>(chunk.begin - 1, 0, layers),
          std::min<std::int64_t>(chunk.end - 1, layers)};
}

// --- A micro-batch --------------------------------------------------------------------------------------

LanguageMicroBatch::LanguageMicroBatch(const LanguageModel& model, Engine& engine, const TokenBatch& batch,
                                       Kind kind)
    : model_(model),
      engine_(engine),
      pass_(model.pass_of(engine, batch, kind != Kind::evaluation)),
      training_(kind != Kind::evaluation) {
  if (kind == Kind::beside) {
    engine.begin_micro_batch_beside(shape_of(pass_), batch.samples);
  } else {
    engine.begin_micro_batch(shape_of(pass_), batch.samples);
  }
  totals_ = acquire_totals(engine);
  local_ = LocalBatch(pass_, batch);
  pass_.tables = model.acquire_tables(pass_);
}

std::unique_ptr<pipeline::ChunkWork> LanguageMicroBatch::begin(const Engine::Chunk& chunk) {
  return std::make_unique<LanguageChunk>(*this, chunk);
}

void LanguageMicroBatch::end() {
  engine_.end_micro_batch(totals_[0], totals_[1]);
  totals_.release();
  local_.release();
  pass_.tables.release();
}

LanguageChunk::LanguageChunk(LanguageMicroBatch& micro_batch, const Engine::Chunk& chunk)
    : of_(micro_batch),
      model_(micro_batch.model_),
      engine_(micro_batch.engine_),
      pass_(micro_batch.pass_),
      chunk_(chunk),
      first_block_(blocks_of_chunk(chunk, pass_.shape.layers).begin),
      end_block_(blocks_of_chunk(chunk, pass_.shape.layers).end),
      training_(micro_batch.training_),
      recompute_(training_ && engine_.config().activation_checkpointing),
      residuals_(static_cast<std::size_t>(pass_.shape.layers) + 1),
      activations_(static_cast<std::size_t>(pass_.shape.layers)),
      inputs_(static_cast<std::size_t>(pass_.shape.layers)) {
  if (training_) save_every_ = recompute_ ? std::max(engine_.config().checkpoint_every, 1) : 1;
}

std::int64_t LanguageChunk::group_begin(std::int64_t end) const {
  return std::max((end - 1) / save_every_ * save_every_, first_block_);
}

// --- Forward --------------------------------------------------------------------------------------------

TensorView LanguageChunk::input() {
  residual(first_block_) = acquire_residual(pass_, "residual");
  return residual(first_block_)[0];
}

void LanguageChunk::forward_block(std::int64_t block, const GatheredUnit& unit, const TensorView& input,
                                  bool save) {
  StepTensors activations = model_.acquire_block_activations(pass_);
  if (!residual(block + 1).held()) residual(block + 1) = acquire_residual(pass_, "residual");
  model_.block_forward(pass_, block, unit, input, activations, &residual(block + 1)[0]);
  if (save) activations_[static_cast<std::size_t>(block)] = std::move(activations);
}

void LanguageChunk::forward() {
  if (has_embedding()) {
    residual(0) = acquire_residual(pass_, "residual");
    model_.embedding_forward(pass_, engine_.gather(embedding), of_.local_.tokens(), residual(0)[0]);
  }
  for (std::int64_t block = first_block_; block < end_block_; ++block) {
    const bool saves = save_every_ > 0 && block == group_begin(block + 1);
    const TensorView input = residual(block)[0];
    HostCopy& kept = inputs_[static_cast<std::size_t>(block)];
    // The copy to the host runs while the block reads the input; the memory is released after both.
    if (saves && recompute_) kept = engine_.send_to_host(residual(block).take(), "block input");
    forward_block(block, engine_.gather(model_.unit_of_block(block)), input, save_every_ > 0 && !recompute_);
    kept.leave_device();
    if (!saves) residual(block).release();
  }
  if (training_ || !has_head()) return;
  language_head(model_, pass_, engine_.gather(model_.unit_of_head()), nullptr, residual(end_block_)[0],
                of_.local_.targets(), of_.totals_[0], of_.totals_[1], nullptr);
  residual(end_block_).release();
}

ConstTensorView LanguageChunk::output() {
  return residual(end_block_)[0];
}

void LanguageChunk::output_sent(const Event& sent) {
  if (training_) {
    output_sent_ = sent;
  } else {
    residual(end_block_).take().release(sent);
  }
}

// --- Backward -------------------------------------------------------------------------------------------

/// Recomputes the activations of a block from its saved input, without values that only the next block needs.
void LanguageChunk::recompute_block(std::int64_t block, const GatheredUnit& unit) {
  StepTensors& activations = activations_[static_cast<std::size_t>(block)];
  activations = model_.acquire_block_activations(pass_);
  model_.block_forward(pass_, block, unit, residual(block)[0], activations, nullptr);
}

/// Starts the copy back of the saved input of the group of blocks that ends before block `end`.
void LanguageChunk::prefetch_input(std::int64_t end) {
  if (end <= first_block_ || !engine_.config().overlap) return;
  engine_.prefetch_from_host(inputs_[static_cast<std::size_t>(group_begin(end))]);
}

/// Moves the saved input of a block back to the device, into the residuals.
void LanguageChunk::fetch_input(std::int64_t block) {
  residual(block) = StepTensors(engine_.fetch_from_host(std::move(inputs_[static_cast<std::size_t>(block)])),
                                {residual_request(pass_)});
}

TensorView LanguageChunk::output_gradient() {
  if (recompute_) prefetch_input(end_block_);
  gradient_ = acquire_residual(pass_, "residual gradient");
  return gradient_[0];
}

void LanguageChunk::release_block(std::int64_t block) {
  activations_[static_cast<std::size_t>(block)].release();
  residual(block).release();
}

void LanguageChunk::backward_block(std::int64_t block, const GatheredUnit& unit, const TensorView& gradient,
                                   WeightGradients::When when) {
  const UnitId id = model_.unit_of_block(block);
  const StepTensors& activations = activations_[static_cast<std::size_t>(block)];
  if (when == WeightGradients::When::later) {
    put_off_.emplace_back(block, engine_.gradients_ahead(id));
    model_.block_backward(pass_, block, unit, put_off_.back().weights, residual(block)[0], activations,
                          gradient);
    return;
  }
  UnitGradients gradients = engine_.gradients(id);
  WeightGradients weights(gradients);
  model_.block_backward(pass_, block, unit, weights, residual(block)[0], activations, gradient);
  std::move(gradients).reduce();
  release_block(block);
}

void LanguageChunk::backward_blocks(const TensorView& gradient, WeightGradients::When when) {
  std::vector<GatheredUnit> held;
  for (std::int64_t end = end_block_; end > first_block_;) {
    const std::int64_t begin = group_begin(end);
    const bool stays_gathered = group_stays_gathered(engine_.config(), end - begin);
    if (recompute_) {
      fetch_input(begin);
      prefetch_input(begin);
    }
    for (std::int64_t block = begin; recompute_ && block < end - 1; ++block) {
      GatheredUnit unit = engine_.gather(model_.unit_of_block(block));
      forward_block(block, unit, residual(block)[0], true);
      if (stays_gathered) held.push_back(std::move(unit));
    }
    for (std::int64_t block = end - 1; block >= begin; --block) {
      const bool last = block == end - 1;
      const GatheredUnit unit =
          held.empty() || last ? engine_.gather(model_.unit_of_block(block)) : std::move(held.back());
      if (!last && !held.empty()) held.pop_back();
      if (recompute_ && last) recompute_block(block, unit);
      backward_block(block, unit, gradient, when);
    }
    end = begin;
  }
}

void LanguageChunk::backward_head() {
  const TensorView gradient = output_gradient();
  const GatheredUnit unit = engine_.gather(model_.unit_of_head());
  UnitGradients gradients = engine_.gradients(model_.unit_of_head());
  language_head(model_, pass_, unit, &gradients, residual(end_block_)[0], of_.local_.targets(),
                of_.totals_[0], of_.totals_[1], &gradient);
  std::move(gradients).reduce();
}

void LanguageChunk::backward(WeightGradients::When when) {
  if (has_head()) {
    backward_head();
    residual(end_block_).release();
  } else {
    residual(end_block_).take().release(output_sent_);  // it has passed, because the gradient has arrived
  }
  backward_blocks(gradient_[0], when);
  if (!has_embedding()) return;
  UnitGradients gradients = engine_.gradients(embedding);
  model_.embedding_backward(pass_, gradients, of_.local_.tokens(), gradient_[0]);
  std::move(gradients).reduce();
  gradient_.release();
}

void LanguageChunk::weight_gradients() {
  for (PutOff& put_off : put_off_) {
    put_off.weights.run();
    std::move(put_off.unit).reduce();
    release_block(put_off.block);
  }
  put_off_.clear();
}

ConstTensorView LanguageChunk::input_gradient() {
  return gradient_[0];
}

void LanguageChunk::input_gradient_sent(const Event& sent) {
  gradient_.take().release(sent);
}

}  // namespace tranche::models
