#pragma once
/// Finite differences against a model's backward, tensor by tensor.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tranche/core/shape.h"

namespace tranche {

class Engine;

struct GradientCheckOptions {
  std::int64_t elements = 32;  ///< of a tensor that are compared; a smaller tensor is compared whole
  std::uint64_t seed = 1;      ///< draws them
  /// Relative difference that is let pass, beside what rounding and curvature make of the differences.
  double tolerance = 5e-3;
};

/// A tensor's gradient beside central differences of the loss.
struct TensorCheck {
  std::string unit, tensor;
  Shape shape;
  bool frozen = false;       ///< has no gradient: nothing was compared
  std::int64_t checked = 0;  ///< elements that were compared
  std::int64_t unresolved =
      0;  ///< of them, so small beside the loss's rounding that a difference says little
  /// Compared elements at which the loss has a kink in the weight itself (a ReLU of a sum that is exactly 0):
  /// the backward lies between the slopes on both sides, and neither slope is the right one.
  std::int64_t kinks = 0;
  std::int64_t wrong = 0;  ///< of them
  std::int64_t worst = 0;  ///< index of the element with the largest error
  double backward = 0;     ///< its gradient by the backward
  double difference = 0;   ///< and by the differences
  double error = 0;        ///< |backward - difference| over the larger of both
  bool untold = false;     ///< no element that has a gradient was resolved: nothing can be said of it
  bool told = false;       ///< an element was resolved whose gradient or difference is not 0
  std::string finding;     ///< what is wrong, and what it looks like; empty: nothing
};

struct GradientCheck {
  double loss = 0;                   ///< mean, at the weights that were checked
  std::vector<TensorCheck> tensors;  ///< of all units, in the model's order
  std::vector<std::string> notes;    ///< what this batch cannot show
  /// Something could be told, and no gradient was found to be wrong. text() says which could not be told
  /// (TensorCheck::untold).
  bool passed() const;
  /// A line for each tensor, findings and notes behind them.
  std::string text() const;
};

/// Collective; between steps. Compares what the backward hands over with central differences of the loss, in
/// the engine's own fp32, for each tensor of each unit, and says which unit, tensor and element is wrong and
/// what that looks like: a factor (a loss_gradient_scale() that was left out, a sign), a transposed matrix, a
/// gradient that is never added, or another term.
///
/// `micro_batches` makes all micro-batches of one step, begin_micro_batch() to end_micro_batch(), without
/// step(). It is called some hundred times for each tensor, on all ranks, and must compute the same each
/// time: the same batch, and dropout from the same seeds and samples. Any stage, reduction and number of
/// micro-batches will do, and any mesh without a pipeline or the axis tensor; a tied tensor is checked once,
/// as it is one. Take a small model, and weights as they are in training: biases of zero or a head of zeros
/// hide faults behind them (Engine::write_weight()).
///
/// Afterwards weights and optimizer state are as before, to the bit. steps() and samples() have counted the
/// passes, and the gradient hook is removed. If `micro_batches` throws, the step that it left open is given
/// up, and the engine can go on where every rank threw at the same place. With several ranks one element may
/// then keep the step of a difference: write or load the weights first.
///
/// Throws ConfigurationError unless everything is fp32 (compute, communication, accumulation, no int8
/// blocks), on a mesh with a pipeline or the axis tensor, and on the meta device, which computes nothing;
/// LogicError if `micro_batches` called step(), left a step unfinished, or gave another loss the second time;
/// NumericalError for a loss or gradient that is not finite.
GradientCheck check_gradients(Engine& engine, const std::function<void()>& micro_batches,
                              const GradientCheckOptions& options = {});

}  // namespace tranche
