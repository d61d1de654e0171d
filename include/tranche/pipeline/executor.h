#pragma once
/// A step, or an evaluation, of a model whose units are divided among the stages of a pipeline.

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
/// shape from their own batch, of which all stages of a data rank have the same: nothing is negotiated.
class ChunkWork {
 public:
  ChunkWork() = default;
  ChunkWork(const ChunkWork&) = delete;
  ChunkWork& operator=(const ChunkWork&) = delete;
  virtual ~ChunkWork() = default;

  /// Memory for the residual that the chunk before makes. Called before forward(), not on the first chunk.
  virtual TensorView input() = 0;
  virtual void forward() = 0;
  /// The residual for the next chunk, behind forward(); not on the last chunk.
  virtual ConstTensorView output() = 0;
  /// The residual may be overwritten once `sent` has passed. In training it is kept until backward(): memory
  /// that the stage asked for again before it has received the gradient could make both stages wait for each
  /// other, each for the other to take what it sent.
  virtual void output_sent(const Event& sent) = 0;

  /// Memory for the gradient of output(), which the next chunk makes. Called before backward(), not on the
  /// last chunk. run_forward() does not call this function, nor any below; by default they throw LogicError.
  virtual TensorView output_gradient();
  /// Input and weight gradients together.
  virtual void backward();
  /// In place of backward(): the gradient of input() alone. What weight_gradients() reads is kept.
  virtual void input_gradients();
  /// The gradients that input_gradients() left out. Weights get them in ascending micro-batches.
  virtual void weight_gradients();
  /// The gradient of input(), behind backward() or input_gradients(); not on the first chunk.
  virtual ConstTensorView input_gradient();
  virtual void input_gradient_sent(const Event& sent);
};

/// One micro-batch on this rank: what its chunks share. A model implements it. The constructor begins the
/// micro-batch of the engine (Engine::begin_micro_batch_beside() in training).
class MicroBatchWork {
 public:
  MicroBatchWork() = default;
  MicroBatchWork(const MicroBatchWork&) = delete;
  MicroBatchWork& operator=(const MicroBatchWork&) = delete;
  virtual ~MicroBatchWork() = default;

  /// Begins the micro-batch on a chunk of this rank (Engine::stage()).
  virtual std::unique_ptr<ChunkWork> begin(const Engine::Chunk& chunk) = 0;
  /// Ends the engine's micro-batch. All chunks have done their work.
  virtual void end() = 0;
};

/// Begins a micro-batch of this rank by its number, from 0 on, in ascending order.
using BeginWork = std::function<std::unique_ptr<MicroBatchWork>(std::int64_t micro_batch)>;

/// The actions of this rank in Engine::pipeline_schedule(), for a step's Config::accumulation_steps
/// micro-batches; Engine::step() follows. Collective over the stages of a data rank. The weights' gradients
/// are added in ascending micro-batches on each chunk, so that no schedule changes a bit. Throws what the
/// work and the messages throw.
void run_step(Engine& engine, const BeginWork& begin);
/// Forward of one micro-batch of an evaluation, or of a pass of inference, through all chunks. Each stage
/// returns when it has sent its last output, and may begin the next forward while later stages work on this
/// one. Collective over the stages of a data rank. `phase` stands in errors and traces.
void run_forward(Engine& engine, const BeginWork& begin, std::string_view phase = "evaluate");
/// Gives values in host memory that the last chunk's stage has computed to all stages of its data rank, and
/// waits. Collective over those, with as many values on each. `what` names them in errors.
void give_to_all_stages(Engine& engine, std::span<float> values, std::string_view what);

}  // namespace tranche::pipeline
