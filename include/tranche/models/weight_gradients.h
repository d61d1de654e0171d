#pragma once
/// The weight gradients of a unit's backward, computed where they arise or later.

#include <functional>
#include <utility>
#include <vector>

#include "tranche/engine/handles.h"
#include "tranche/models/step_tensors.h"

namespace tranche::models {

/// Takes the work on weight gradients that a block's backward finds, so that the backward is written once for
/// both schedules: computed at once, or kept, with the tensors that it reads, until run(). A pipeline
/// computes it then where a rank would wait (zero bubble, Qi et al., 2023). Gradients have the same bits
/// either way, as each tensor sees the same additions in the same order. The block's input and activations
/// must live until run().
class WeightGradients {
 public:
  enum class When : std::uint8_t { now, later };
  /// `gradients` must outlive it.
  explicit WeightGradients(const UnitGradients& gradients, When when = When::now)
      : gradients_(gradients), later_(when == When::later) {}

  /// For those that a kernel computes along with an input gradient (of norms), and for `work`.
  const UnitGradients& unit() const noexcept { return gradients_; }

  /// Calls work() now or in run(). Views that it reads must be of activations, lasting() or in keep().
  template <typename Work>
  void add(Work&& work) {
    if (later_) {
      work_.emplace_back(std::forward<Work>(work));
    } else {
      work();
    }
  }
  /// The view itself where work is done at once, else a copy of it as it is now: for a tensor that backward
  /// overwrites.
  ConstTensorView lasting(Engine& engine, const ConstTensorView& view);
  /// Releases scratch memory that added work may read: now, or after run().
  void keep(StepTensors scratch) {
    if (later_) kept_.push_back(std::move(scratch));
  }
  /// Does what was kept, in its order, and releases its memory.
  void run();

 private:
  const UnitGradients& gradients_;
  bool later_ = false;
  std::vector<std::function<void()>> work_;
  std::vector<StepTensors> kept_;
};

}  // namespace tranche::models
