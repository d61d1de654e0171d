#pragma once
/// Weight gradients of a unit's backward, computed at once or later.

#include <functional>
#include <utility>
#include <vector>

#include "tranche/engine/handles.h"
#include "tranche/models/step_tensors.h"

namespace tranche::models {

/// Collects the work on weight gradients in a block's backward, so that one backward serves both schedules:
/// the work is done at once, or stored, with the tensors that it reads, until run(). A pipeline runs it when
/// a rank would otherwise wait (zero bubble, Qi et al., 2023). Gradients have the same bits either way,
/// because each tensor gets the same additions in the same order. The block's input and activations must live
/// until run().
class WeightGradients {
 public:
  enum class When : std::uint8_t { now, later };
  /// `gradients` must outlive it.
  explicit WeightGradients(const UnitGradients& gradients, When when = When::now)
      : gradients_(gradients), later_(when == When::later) {}

  /// For gradients that a kernel computes together with an input gradient (of norms), and for `work`.
  const UnitGradients& unit() const noexcept { return gradients_; }

  /// Calls work() now or in run(). The views that it reads must be of activations, of lasting(), or of memory
  /// in keep().
  template <typename Work>
  void add(Work&& work) {
    if (later_) {
      work_.emplace_back(std::forward<Work>(work));
    } else {
      work();
    }
  }
  /// Returns the view if work is done at once, otherwise a copy of its present contents, for a tensor that
  /// backward overwrites.
  ConstTensorView lasting(Engine& engine, const ConstTensorView& view);
  /// Releases scratch memory that added work may read: now, or after run().
  void keep(StepTensors scratch) {
    if (later_) kept_.push_back(std::move(scratch));
  }
  /// Runs the stored work, in order, and releases its memory.
  void run();

 private:
  const UnitGradients& gradients_;
  bool later_ = false;
  std::vector<std::function<void()>> work_;
  std::vector<StepTensors> kept_;
};

}  // namespace tranche::models
