#pragma once
/// Compares a model's backward with finite differences, tensor by tensor.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tranche/core/shape.h"

namespace tranche {

class Engine;

struct GradientCheckOptions {
  std::int64_t elements = 32;  ///< compared in each tensor; a smaller tensor is compared whole
  std::uint64_t seed = 1;      ///< for drawing the elements
  /// The relative difference that is accepted, in addition to the differences' own error by rounding and
  /// curvature.
  double tolerance = 5e-3;
};

/// A tensor's gradient compared with central differences of the loss.
struct TensorCheck {
  std::string unit, tensor;
  Shape shape;
  bool frozen = false;       ///< it has no gradient, so nothing was compared
  std::int64_t checked = 0;  ///< elements that were compared
  std::int64_t unresolved =
      0;  ///< compared elements whose gradient is too small against the loss's rounding to decide
  /// Compared elements at which the loss has a kink in the weight itself (a ReLU of a sum that is exactly 0).
  /// The backward lies between the slopes on both sides, and neither slope is the right one.
  std::int64_t kinks = 0;
  std::int64_t wrong = 0;  ///< compared elements with a wrong gradient
  std::int64_t worst = 0;  ///< index of the element with the largest error
  double backward = 0;     ///< its gradient from the backward
  double difference = 0;   ///< its gradient from finite differences
  double error = 0;        ///< |backward - difference| over the larger of both
  bool untold = false;     ///< no element with a gradient was resolved, so the tensor's result is unknown
  bool told = false;       ///< an element was resolved whose gradient or difference is not 0
  std::string finding;     ///< describes the error and its likely cause; empty: no error
};

struct GradientCheck {
  double loss = 0;                   ///< the mean loss at the checked weights
  std::vector<TensorCheck> tensors;  ///< of all units, in the model's order
  std::vector<std::string> notes;    ///< the limits of the check with this batch
  /// True when at least one gradient was checked and none was found wrong. text() lists tensors whose result
  /// is unknown (TensorCheck::untold).
  bool passed() const;
  /// One line for each tensor, followed by findings and notes.
  std::string text() const;
};

/// Collective; between steps. Compares the gradients that the backward submits with central differences of
/// the loss, in the engine's own fp32, for each tensor of each unit. It reports which unit, tensor and
/// element is wrong and the likely cause: a factor (a loss_gradient_scale() that was left out, a sign), a
/// transposed matrix, a gradient that is never added, or another term.
///
/// `micro_batches` runs all micro-batches of one step, begin_micro_batch() to end_micro_batch(), without
/// step(). It is called some hundred times for each tensor, on all ranks, and must compute the same each
/// time: the same batch, and dropout from the same seeds and samples. It works with any stage, reduction and
/// number of micro-batches, and with any mesh without a pipeline or the axis tensor. A tied tensor is checked
/// once. Use a small model, with weights as they are in training: biases of zero or a head of zeros hide
/// errors in the layers before them (Engine::write_weight()).
///
/// Afterwards weights and optimizer state have the same bits as before. steps() and samples() have counted
/// the passes, and the gradient hook is removed. If `micro_batches` throws, the open step is abandoned; the
/// engine remains usable if every rank threw at the same place. With several ranks one element may then still
/// have the value used for a difference: write or load the weights first.
///
/// Throws ConfigurationError unless everything is fp32 (compute, communication, accumulation, no int8
/// blocks), on a mesh with a pipeline or the axis tensor, and on the meta device, which computes nothing;
/// LogicError if `micro_batches` called step(), left a step unfinished, or gave another loss the second time;
/// NumericalError for a loss or gradient that is not finite.
GradientCheck check_gradients(Engine& engine, const std::function<void()>& micro_batches,
                              const GradientCheckOptions& options = {});

}  // namespace tranche
