#pragma once
/// Runs a step, or an evaluation, of a model whose units are divided among the stages of a pipeline.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "tranche/core/tensor_view.h"
#include "tranche/device/event.h"
#include "tranche/engine/engine.h"

namespace tranche::pipeline {

/// One micro-batch on one chunk of this rank, from its first action to its last. A model implements it. The
/// executor makes the micro-batch the engine's current one before each call.
///
/// A residual is [rows, ModelSpec::residual_width] in the compute dtype. Both sides of a cut compute its
/// shape from their own batch, which is the same on all stages of a data rank, so that no shapes are sent.
class ChunkWork {
 public:
  ChunkWork() = default;
  ChunkWork(const ChunkWork&) = delete;
  ChunkWork& operator=(const ChunkWork&) = delete;
  virtual ~ChunkWork() = default;

  /// Memory into which the residual of the chunk before is received. Called before forward(), not on the
  /// first chunk.
  virtual TensorView input() = 0;
  virtual void forward() = 0;
  /// The residual for the next chunk, after forward(); not on the last chunk.
  virtual ConstTensorView output() = 0;
  /// The residual may be overwritten once `sent` has passed. In training the model keeps it until backward().
  /// If a stage reused that memory before it had received the gradient, two stages could deadlock, each
  /// waiting for the other to receive its message.
  virtual void output_sent(const Event& sent) = 0;

  /// Memory into which the gradient of output() is received from the next chunk. Called before backward(),
  /// not on the last chunk. run_forward() calls neither this function nor those below; by default they throw
  /// LogicError.
  virtual TensorView output_gradient();
  /// Computes input and weight gradients together.
  virtual void backward();
  /// Computes only the gradient of input(), instead of backward(). Memory that weight_gradients() reads must
  /// be kept.
  virtual void input_gradients();
  /// Computes the gradients that input_gradients() left out. They are added to weights in ascending
  /// micro-batches.
  virtual void weight_gradients();
  /// The gradient of input(), after backward() or input_gradients(); not on the first chunk.
  virtual ConstTensorView input_gradient();
  virtual void input_gradient_sent(const Event& sent);
};

/// One micro-batch on this rank, with the state that its chunks share. A model implements it. The constructor
/// begins the engine's micro-batch (Engine::begin_micro_batch_beside() in training).
class MicroBatchWork {
 public:
  MicroBatchWork() = default;
  MicroBatchWork(const MicroBatchWork&) = delete;
  MicroBatchWork& operator=(const MicroBatchWork&) = delete;
  virtual ~MicroBatchWork() = default;

  /// Begins the micro-batch on a chunk of this rank (Engine::stage()).
  virtual std::unique_ptr<ChunkWork> begin(const Engine::Chunk& chunk) = 0;
  /// Ends the engine's micro-batch, after all chunks have finished.
  virtual void end() = 0;
};

/// Begins this rank's micro-batch of that number, from 0, in ascending order.
using BeginWork = std::function<std::unique_ptr<MicroBatchWork>(std::int64_t micro_batch)>;

/// Runs the actions of this rank in Engine::pipeline_schedule(), for a step's Config::accumulation_steps
/// micro-batches; call Engine::step() afterwards. Collective over the stages of a data rank. The weights'
/// gradients are added in ascending micro-batches on each chunk, so that the bits do not depend on the
/// schedule. Throws errors of the model and of messages.
void run_step(Engine& engine, const BeginWork& begin);
/// Runs the forward of one micro-batch of an evaluation, or of an inference pass, through all chunks. Each
/// stage returns when it has sent its last output, and may begin the next forward while later stages still
/// compute this one. Collective over the stages of a data rank. Errors and traces name `phase`.
void run_forward(Engine& engine, const BeginWork& begin, std::string_view phase = "evaluate");
/// Broadcasts values in host memory from the stage with the last chunk to all stages of its data rank, and
/// waits. Collective over those stages, with an equal number of values. Errors name `what`.
void give_to_all_stages(Engine& engine, std::span<float> values, std::string_view what);

}  // namespace tranche::pipeline
