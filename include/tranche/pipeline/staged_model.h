#pragma once
/// Runs a user's model on the stages of a pipeline, under any schedule. The model computes a range of its
/// units; the executor owns the memory of tensors that cross stages, the messages and the order.
/// examples/staged_network.cpp is an example.

#include <cstdint>
#include <memory>

#include "tranche/core/dtype.h"
#include "tranche/core/shape.h"
#include "tranche/core/tensor_view.h"
#include "tranche/engine/engine.h"

namespace tranche::pipeline {

/// The tensor that one chunk passes to the next in a micro-batch. All stages of a data rank compute the same
/// dtype and shape from their own batch. Each token has ModelSpec::residual_width elements of it, which the
/// formula of traffic uses.
struct Boundary {
  DataType dtype = DataType::float32;
  Shape shape;
};

/// One micro-batch on one chunk, from its forward to its weight gradients. A model implements it and stores
/// in it the values that its backward reads. The micro-batch is the engine's current one in each call. It is
/// destroyed after weight_gradients(), in an evaluation at the micro-batch's end, and always before its
/// StagedMicroBatch.
class StagedChunk {
 public:
  StagedChunk() = default;
  StagedChunk(const StagedChunk&) = delete;
  StagedChunk& operator=(const StagedChunk&) = delete;
  virtual ~StagedChunk() = default;

  /// Computes *output = chunk(*input), for uses of units that the chunk names (Engine::Chunk). `input` is
  /// null on the first chunk, and `output` on the last, which adds its loss. Both stay valid until
  /// weight_gradients().
  virtual void forward(const ConstTensorView* input, const TensorView* output) = 0;
  /// Computes *input_gradient from the gradient of the output; they are null on the last and the first chunk.
  /// The gradient of the output stays valid until weight_gradients(). Not called in an evaluation.
  virtual void input_gradients(const ConstTensorView* output_gradient, const TensorView* input_gradient) = 0;
  /// Adds the gradients of the units' weights (Engine::gradients()) and submits them. A schedule may call it
  /// at once or after other micro-batches' input gradients, in ascending micro-batches. If input_gradients()
  /// itself adds to weight gradients, it gets them by Engine::gradients_ahead(), and this function submits
  /// them.
  virtual void weight_gradients() = 0;
};

/// One micro-batch on this rank. A model implements it. Its constructor calls
/// Engine::begin_micro_batch_beside(), or begin_micro_batch() in an evaluation.
class StagedMicroBatch {
 public:
  StagedMicroBatch() = default;
  StagedMicroBatch(const StagedMicroBatch&) = delete;
  StagedMicroBatch& operator=(const StagedMicroBatch&) = delete;
  virtual ~StagedMicroBatch() = default;

  virtual Boundary boundary() const = 0;
  virtual std::unique_ptr<StagedChunk> begin(const Engine::Chunk& chunk) = 0;
  /// Calls Engine::end_micro_batch(), with a loss and a count of zero if this rank does not have the last
  /// chunk.
  virtual void end() = 0;
};

class StagedModel {
 public:
  virtual ~StagedModel() = default;
  /// Begins the micro-batch with this number in a step; in an evaluation the number is 0.
  virtual std::unique_ptr<StagedMicroBatch> begin(Engine& engine, std::int64_t micro_batch,
                                                  bool training) = 0;
};

/// Runs forward and backward of all micro-batches of a step in the order of Config::pipeline_schedule, or one
/// micro-batch after the other without a pipeline; call Engine::step() afterwards. Collective over the stages
/// of a data rank; an error on one of them ends all. Throws errors of the model and of messages.
void train_step(StagedModel& model, Engine& engine);
/// Runs the forward of one micro-batch between Engine::begin_evaluation() and end_evaluation(). Collective
/// likewise.
void evaluate(StagedModel& model, Engine& engine);

}  // namespace tranche::pipeline
