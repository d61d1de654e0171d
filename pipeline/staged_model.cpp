#include "tranche/pipeline/staged_model.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "pipeline/schedule/run_order.h"
#include "tranche/core/error.h"
#include "tranche/device/step_arena.h"
#include "tranche/pipeline/executor.h"

namespace tranche::pipeline {

namespace {

/// Memory of a boundary tensor, or of its gradient.
class BoundaryMemory {
 public:
  BoundaryMemory() = default;
  BoundaryMemory(Engine& engine, const Boundary& boundary, std::string_view tag)
      : buffer_(
            engine.acquire(boundary.shape.elements() * size_of(boundary.dtype), Category::activations, tag)),
        view_{buffer_.data(), boundary.dtype, boundary.shape} {}
  const TensorView& view() const { return view_; }
  /// Releases the memory, for reuse after the present work of the compute stream, or once `passed` has
  /// passed.
  void release() { buffer_.release(); }
  void release(const Event& passed) { buffer_.release(passed); }

 private:
  StepBuffer buffer_;
  TensorView view_;
};

/// A chunk of a model, with the memory of its two boundary tensors.
class CutChunk : public ChunkWork {
 public:
  CutChunk(Engine& engine, const Engine::Chunk& chunk, const Boundary& boundary,
           std::unique_ptr<StagedChunk> work, bool training)
      : engine_(engine), chunk_(chunk), boundary_(boundary), work_(std::move(work)), training_(training) {}

  TensorView input() override {
    input_ = {engine_, boundary_, "input of a chunk"};
    return input_.view();
  }
  void forward() override {
    if (!chunk_.last()) output_ = {engine_, boundary_, "output of a chunk"};
    const ConstTensorView input = input_.view();
    work_->forward(chunk_.first() ? nullptr : &input, chunk_.last() ? nullptr : &output_.view());
    if (!training_ && !chunk_.first()) input_.release();
  }
  ConstTensorView output() override { return output_.view(); }
  void output_sent(const Event& sent) override {
    output_sent_ = sent;
    if (!training_) output_.release(sent);
  }

  TensorView output_gradient() override {
    output_gradient_ = {engine_, boundary_, "gradient of a chunk's output"};
    return output_gradient_.view();
  }
  void input_gradients() override {
    if (!chunk_.first()) input_gradient_ = {engine_, boundary_, "gradient of a chunk's input"};
    const ConstTensorView gradient = output_gradient_.view();
    work_->input_gradients(chunk_.last() ? nullptr : &gradient,
                           chunk_.first() ? nullptr : &input_gradient_.view());
  }
  void weight_gradients() override {
    work_->weight_gradients();
    work_.reset();
    if (!chunk_.first()) input_.release();
    if (chunk_.last()) return;
    output_.release(output_sent_);  // it has passed, because the gradient has arrived
    output_gradient_.release();
  }
  void backward() override {
    input_gradients();
    weight_gradients();
  }
  ConstTensorView input_gradient() override { return input_gradient_.view(); }
  void input_gradient_sent(const Event& sent) override { input_gradient_.release(sent); }

 private:
  Engine& engine_;
  Engine::Chunk chunk_;
  Boundary boundary_;
  std::unique_ptr<StagedChunk> work_;
  bool training_;
  BoundaryMemory input_, output_, output_gradient_, input_gradient_;
  Event output_sent_;
};

class CutMicroBatch : public MicroBatchWork {
 public:
  CutMicroBatch(StagedModel& model, Engine& engine, std::int64_t micro_batch, bool training)
      : engine_(engine), work_(model.begin(engine, micro_batch, training)), training_(training) {}
  std::unique_ptr<ChunkWork> begin(const Engine::Chunk& chunk) override {
    return std::make_unique<CutChunk>(engine_, chunk, work_->boundary(), work_->begin(chunk), training_);
  }
  void end() override { work_->end(); }

 private:
  Engine& engine_;
  std::unique_ptr<StagedMicroBatch> work_;
  bool training_;
};

/// Runs the only chunk of a model without a pipeline.
void run_whole(StagedModel& model, Engine& engine, std::int64_t micro_batch, bool training) {
  CutMicroBatch work(model, engine, micro_batch, training);
  {
    const std::unique_ptr<ChunkWork> chunk = work.begin(engine.stage().chunks.front());
    chunk->forward();
    if (training) chunk->backward();
  }
  work.end();
}

/// Gradients of a tensor with two uses are distinguished by their order: those of the later use are first. If
/// two chunks of this rank use the same unit, weight gradients of the later chunk must therefore be first,
/// too.
void require_order_of_uses(const Engine& engine) {
  const Engine::StageUses stage = engine.stage();
  const auto units_of = [&](int number) {
    const auto chunk = std::find_if(stage.chunks.begin(), stage.chunks.end(),
                                    [&](const Engine::Chunk& one) { return one.number == number; });
    std::set<int> units;
    for (int use = chunk->begin; use < chunk->end; ++use) {
      units.insert(engine.model().forward[static_cast<std::size_t>(use)].unit.index);
    }
    return units;
  };
  for (const auto& [action, later_chunk] : engine.rank_schedule(true).order.early_weights) {
    const std::set<int> units = units_of(action.chunk), others = units_of(later_chunk);
    const auto shared =
        std::find_if(units.begin(), units.end(), [&](int unit) { return others.contains(unit); });
    if (shared == units.end()) continue;
    throw ConfigurationError("tranche.pipeline_schedule: " + engine.config().pipeline_schedule + ": " +
                             action.name() + " of rank " + std::to_string(stage.stage) +
                             " stands before the weight gradients of chunk " + std::to_string(later_chunk) +
                             ", which uses unit " + engine.model().unit({*shared}).name +
                             " too: gradients of its later use have to come first");
  }
}

}  // namespace

void train_step(StagedModel& model, Engine& engine) {
  if (engine.stage().stages == 1) {
    for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) run_whole(model, engine, m, true);
    return;
  }
  require_order_of_uses(engine);
  run_step(engine, [&](std::int64_t micro_batch) {
    return std::make_unique<CutMicroBatch>(model, engine, micro_batch, true);
  });
}

void evaluate(StagedModel& model, Engine& engine) {
  if (engine.stage().stages == 1) return run_whole(model, engine, 0, false);
  run_forward(engine, [&](std::int64_t micro_batch) {
    return std::make_unique<CutMicroBatch>(model, engine, micro_batch, false);
  });
}

}  // namespace tranche::pipeline
