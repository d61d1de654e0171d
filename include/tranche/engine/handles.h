#pragma once
/// Handles that a model holds while it computes with a unit.

#include <cstdint>
#include <memory>
#include <string_view>

#include "tranche/core/tensor_view.h"
#include "tranche/engine/model_spec.h"

namespace tranche {

class Engine;

/// Full tensors of a unit in the compute dtype, in memory of the device, valid until released or destroyed:
/// the memory may then be another unit's at once, for work issued later. Move-only. The compute stream
/// already waits for them. Let go while an exception unwinds, it issues nothing and waits for nothing. It
/// belongs to the micro-batch that it was gathered in, whichever is the current one when it goes.
///
/// They are read-only. A write through a cast is lost at the next gather or update, or, where the compute
/// weights are the master weights (fp32), changes those on this rank alone, which weights_digest() reports;
/// Engine::write_weight() changes weights.
class GatheredUnit {
 public:
  GatheredUnit() = default;
  ~GatheredUnit() { release(); }
  GatheredUnit(GatheredUnit&& other) noexcept;
  GatheredUnit& operator=(GatheredUnit&& other) noexcept;
  GatheredUnit(const GatheredUnit&) = delete;
  GatheredUnit& operator=(const GatheredUnit&) = delete;

  /// Tensor by its index in the UnitSpec.
  ConstTensorView tensor(int index) const;
  /// Tensor by name; throws InvalidArgument naming the unit's tensors.
  ConstTensorView tensor(std::string_view name) const;
  /// Its description, adapters included.
  const UnitSpec& spec() const;
  /// Lets go before end of scope; the memory is reused once the compute stream has passed this point.
  void release() noexcept;

 private:
  friend class Engine;
  Engine* engine_ = nullptr;
  int unit_ = -1;
  std::int64_t micro_batch_ = -1;
  int exceptions_ = 0;  ///< in flight when it was made; more means that an exception unwinds
};

/// A forward pass for its own sake: no loss, no token count, no gradients, no micro-batches. Made and ended
/// between steps, by all ranks alike; while it lives Engine::gather(), acquire() and the others' of a forward
/// pass work as in an evaluation, and what opens, ends or saves anything else throws LogicError. No
/// communication but that of the gathers. One pass a scope: the first records the order of units, the second
/// its memory, later ones repeat both. Buffers and units taken in it go before it does.
class InferenceScope {
 public:
  /// Throws LogicError inside a step, an evaluation or another scope. `shape` as Engine::begin_micro_batch
  /// takes it.
  explicit InferenceScope(Engine& engine, const Shape& shape = {});
  /// Ends it. While an exception unwinds nothing is waited for; what is still held then, or by mistake, stays
  /// valid until it is released, is logged in the latter case, and the next scope records anew.
  ~InferenceScope();
  InferenceScope(const InferenceScope&) = delete;
  InferenceScope& operator=(const InferenceScope&) = delete;

 private:
  Engine& engine_;
  int exceptions_;
};

/// The destination of a gradient that a kernel computes whole.
struct GradientTarget {
  TensorView view;  ///< fp32, with the tensor's shape
  bool accumulate =
      false;  ///< add to what is there; else it is undefined, and every element is to be written
};

/// Full fp32 gradients of a unit to add into; what they hold before (zeros, or sums of earlier uses and
/// micro-batches) is the engine's. They belong to the micro-batch that they were asked for in. Submitted by
/// `std::move(g).reduce()`; destroyed unsubmitted it launches nothing, and the micro-batch fails on all
/// ranks; at once where an exception unwinds.
class UnitGradients {
 public:
  UnitGradients() = default;
  ~UnitGradients();
  UnitGradients(UnitGradients&& other) noexcept;
  UnitGradients& operator=(UnitGradients&&) = delete;
  UnitGradients(const UnitGradients&) = delete;
  UnitGradients& operator=(const UnitGradients&) = delete;

  /// fp32 view with the tensor's shape; a frozen tensor's gradient goes to a scratch that is thrown away.
  TensorView tensor(int index) const;
  TensorView tensor(std::string_view name) const;
  /// The same for a kernel that can write as well as add: where the step has added nothing yet, it writes,
  /// and nobody clears or reads the tensor before. Asked for anew by everything that adds; with accumulate
  /// false the kernel that writes is the next work on the tensor.
  GradientTarget target(int index) const;
  /// False for frozen tensors: computing their gradient can be left out.
  bool wanted(int index) const;
  const UnitSpec& spec() const;
  /// Hands the gradients over; the last use of a pass launches the reduction behind the compute stream.
  void reduce() &&;

 private:
  friend class Engine;
  Engine* engine_ = nullptr;
  int unit_ = -1;
  std::int64_t micro_batch_ = -1;
  int exceptions_ = 0;  ///< in flight when it was made; more means that an exception unwinds
};

}  // namespace tranche
