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

/// One micro-batch on this rank's stage (Engine::stage()), from its first action to its last. A model
/// implements it. Its constructor begins the micro-batch of the engine (Engine::begin_micro_batch_beside() in
/// training). The executor makes the micro-batch the engine's current one before each call.
///
/// A residual is [rows, ModelSpec::residual_width] in the compute dtype. Both sides of a cut compute its
/// shape from their own batch, of which all stages of a data rank have the same: nothing is negotiated.
class StageWork {
 public:
  StageWork() = default;
  StageWork(const StageWork&) = delete;
  StageWork& operator=(const StageWork&) = delete;
  virtual ~StageWork() = default;

  /// Memory for the residual that the stage before sends. Called before forward(), not on the first stage.
  virtual TensorView input() = 0;
  virtual void forward() = 0;
  /// The residual for the next stage, behind forward(); not on the last stage.
  virtual ConstTensorView output() = 0;
  /// The residual may be overwritten once `sent` has passed. In training it is kept until backward(): memory
  /// that the stage asked for again before it has received the gradient could make both stages wait for each
  /// other, each for the other to take what it sent.
  virtual void output_sent(const Event& sent) = 0;

  /// Memory for the gradient of output(), which the next stage sends. Called before backward(), not on the
  /// last stage. run_forward() does not call this function, nor
  /// backward(), input_gradient() and input_gradient_sent(); by default they throw LogicError.
  virtual TensorView output_gradient();
  virtual void backward();
  /// The gradient of input(), behind backward(); not on the first stage.
  virtual ConstTensorView input_gradient();
  virtual void input_gradient_sent(const Event& sent);

  /// Ends the engine's micro-batch. All memory of the step has been released.
  virtual void end() = 0;
};

/// Begins a micro-batch of this rank by its number, from 0 on.
using BeginWork = std::function<std::unique_ptr<StageWork>(std::int64_t micro_batch)>;

/// Forward and backward of a step's Config::accumulation_steps micro-batches in the order of
/// Config::pipeline_schedule; Engine::step() follows. Collective over the stages of a data rank. The weights'
/// gradients are added in ascending micro-batches on each stage, so that no schedule changes a bit. Throws
/// what the work and the messages throw.
void run_step(Engine& engine, const BeginWork& begin);
/// Forward of one micro-batch of an evaluation, or of a pass of inference. Each stage returns when it has
/// sent its output, and may begin the next forward while later stages work on this one. Collective over the
/// stages of a data rank. `phase` stands in errors and traces.
void run_forward(Engine& engine, const BeginWork& begin, std::string_view phase = "evaluate");
/// Gives values in host memory that the last stage has computed to all stages of its data rank, and waits.
/// Collective over those, with as many values on each. `what` names them in errors.
void give_to_all_stages(Engine& engine, std::span<float> values, std::string_view what);

}  // namespace tranche::pipeline
