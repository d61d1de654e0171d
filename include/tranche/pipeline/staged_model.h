#pragma once
/// A model of one's own on the stages of a pipeline, under any schedule: what it computes of a range of its
/// units. Memory of what crosses between stages, messages and order are the executor's.
/// examples/staged_network.cpp is one.

#include <cstdint>
#include <memory>

#include "tranche/core/dtype.h"
#include "tranche/core/shape.h"
#include "tranche/core/tensor_view.h"
#include "tranche/engine/engine.h"

namespace tranche::pipeline {

/// The tensor that goes from a chunk to the next one in a micro-batch. All stages of a data rank compute the
/// same one from their own batch. A token's part of it has ModelSpec::residual_width elements, which the
/// formula of traffic reads.
struct Boundary {
  DataType dtype = DataType::float32;
  Shape shape;
};

/// One micro-batch on one chunk, from its forward to its weight gradients. A model implements it and keeps in
/// it what its backward reads. The micro-batch is the engine's current one in each call. It is destroyed
/// behind weight_gradients(), in an evaluation at the micro-batch's end, and always before its
/// StagedMicroBatch.
class StagedChunk {
 public:
  StagedChunk() = default;
  StagedChunk(const StagedChunk&) = delete;
  StagedChunk& operator=(const StagedChunk&) = delete;
  virtual ~StagedChunk() = default;

  /// *output = chunk(*input), for uses of units that the chunk names (Engine::Chunk). `input` is null on the
  /// first chunk, and `output` on the last, which adds its loss. Both stay until weight_gradients().
  virtual void forward(const ConstTensorView* input, const TensorView* output) = 0;
  /// *input_gradient = the gradient of the input, from that of the output. Null as above. The gradient of the
  /// output stays until weight_gradients(). Not called in an evaluation.
  virtual void input_gradients(const ConstTensorView* output_gradient, const TensorView* input_gradient) = 0;
  /// Adds the gradients of the units' weights (Engine::gradients()) and hands them over. A schedule may call
  /// it at once or after other micro-batches' input gradients, in ascending micro-batches. Gradients that
  /// input_gradients() adds to by itself are asked for by Engine::gradients_ahead() there, and handed over
  /// here.
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
  /// Calls Engine::end_micro_batch(), with a loss and a count of zero where this rank has not the last chunk.
  virtual void end() = 0;
};

class StagedModel {
 public:
  virtual ~StagedModel() = default;
  /// Begins the micro-batch of this number of a step, or of an evaluation, where it is 0.
  virtual std::unique_ptr<StagedMicroBatch> begin(Engine& engine, std::int64_t micro_batch,
                                                  bool training) = 0;
};

/// Forward and backward of all micro-batches of a step in the order of Config::pipeline_schedule, or one
/// micro-batch after the other without a pipeline; Engine::step() follows. Collective over the stages of a
/// data rank, of which an error on one ends all. Throws what the model and the messages throw.
void train_step(StagedModel& model, Engine& engine);
/// Forward of one micro-batch between Engine::begin_evaluation() and end_evaluation(). Collective likewise.
void evaluate(StagedModel& model, Engine& engine);

}  // namespace tranche::pipeline
