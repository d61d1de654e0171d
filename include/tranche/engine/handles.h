#pragma once
/// Handles that a model holds while it computes with a unit.

#include <cstdint>
#include <memory>
#include <string_view>

#include "tranche/core/tensor_view.h"
#include "tranche/engine/model_spec.h"

namespace tranche {

class Engine;

/// Full tensors of a unit in the compute dtype, in device memory, valid until released or destroyed. The
/// memory may then be reused at once by another unit, for work issued later. Move-only. The compute stream
/// already waits for the tensors. If it is released while an exception unwinds, it issues nothing and waits
/// for nothing. It belongs to the micro-batch in which it was gathered, even if another one is current when
/// it is released. If the engine ends first, tensor() and spec() throw LogicError, and the release does
/// nothing; the same holds for UnitGradients.
///
/// The tensors are read-only. A write through a cast is lost at the next gather or update; or, if the compute
/// weights are the master weights (fp32), it changes them on this rank alone, which weights_digest() reports.
/// Engine::write_weight() changes weights.
class GatheredUnit {
 public:
  GatheredUnit() = default;
  ~GatheredUnit() { release(); }
  GatheredUnit(GatheredUnit&& other) noexcept;
  GatheredUnit& operator=(GatheredUnit&& other) noexcept;
  GatheredUnit(const GatheredUnit&) = delete;
  GatheredUnit& operator=(const GatheredUnit&) = delete;

  /// The tensor with this index in the UnitSpec.
  ConstTensorView tensor(int index) const;
  /// The tensor of this name; throws InvalidArgument naming the unit's tensors.
  ConstTensorView tensor(std::string_view name) const;
  /// The unit's description, adapters included.
  const UnitSpec& spec() const;
  /// Releases the handle before the end of its scope; the memory is reused once the compute stream has passed
  /// this point.
  void release() noexcept;

 private:
  friend class Engine;
  std::shared_ptr<Engine*> engine_;  ///< points to null once the engine has ended
  int unit_ = -1;
  std::int64_t micro_batch_ = -1;
  int exceptions_ = 0;  ///< in flight when it was made; a higher count now means unwinding
};

/// A forward pass without loss, token count, gradients or micro-batches. All ranks make and end it between
/// steps. During its lifetime Engine::gather(), acquire() and the other calls of a forward pass work as in an
/// evaluation; calls that begin, end or save anything else throw LogicError. It communicates only for the
/// gathers. One scope holds one pass: the first records the order of units, the second its memory, later ones
/// repeat both. Buffers and units that are acquired in it must be released before it ends.
class InferenceScope {
 public:
  /// Throws LogicError inside a step, an evaluation or another scope. `shape`: see
  /// Engine::begin_micro_batch().
  explicit InferenceScope(Engine& engine, const Shape& shape = {});
  /// Ends the pass. While an exception unwinds it waits for nothing. Buffers and units that are still held
  /// then stay valid until they are released, and the next scope records anew; if no exception unwinds, this
  /// is logged as a warning.
  ~InferenceScope();
  InferenceScope(const InferenceScope&) = delete;
  InferenceScope& operator=(const InferenceScope&) = delete;

 private:
  Engine& engine_;
  int exceptions_;
};

/// The destination of a gradient that a kernel computes in one call.
struct GradientTarget {
  TensorView view;  ///< fp32, with the tensor's shape
  bool accumulate =
      false;  ///< add to the present values; otherwise they are undefined, and every element must be written
};

/// Full fp32 gradients of a unit, to which a model adds its own. The engine defines the initial values:
/// zeros, or sums of earlier uses and micro-batches. The handle belongs to the micro-batch in which it was
/// requested. `std::move(g).reduce()` submits it. If it is destroyed without that, it launches nothing, and
/// the micro-batch fails on all ranks, at once if an exception unwinds.
class UnitGradients {
 public:
  UnitGradients() = default;
  ~UnitGradients();
  UnitGradients(UnitGradients&& other) noexcept;
  UnitGradients& operator=(UnitGradients&&) = delete;
  UnitGradients(const UnitGradients&) = delete;
  UnitGradients& operator=(const UnitGradients&) = delete;

  /// fp32 view with the tensor's shape; a frozen tensor's gradient is written to scratch memory and
  /// discarded.
  TensorView tensor(int index) const;
  TensorView tensor(std::string_view name) const;
  /// The same for a kernel that can write as well as add. The first gradient of a step is written, so that
  /// the tensor need not be cleared or read before. Call it again for each addition; if `accumulate` is
  /// false, the kernel that writes must be the next work on the tensor.
  GradientTarget target(int index) const;
  /// False for frozen tensors, whose gradients need not be computed.
  bool wanted(int index) const;
  const UnitSpec& spec() const;
  /// Submits the gradients; the last use of a pass launches the reduction, in order after the compute stream.
  void reduce() &&;

 private:
  friend class Engine;
  std::shared_ptr<Engine*> engine_;  ///< points to null once the engine has ended
  int unit_ = -1;
  std::int64_t micro_batch_ = -1;
  int exceptions_ = 0;  ///< in flight when it was made; a higher count now means unwinding
};

}  // namespace tranche
