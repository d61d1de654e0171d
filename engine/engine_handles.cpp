// The handles that a model holds, and the calls of the parts that they stand for.

#include <exception>
#include <utility>

#include "engine/engine_impl.h"
#include "engine/step_guard.h"

namespace tranche {

using namespace detail;

void Engine::Impl::acquire(int unit) {
  const std::string& name = store.units()[static_cast<std::size_t>(unit)].name;
  require(in_pass(), "gather(" + name + ") outside a micro-batch");
  // Backward has begun with the first gradients of the micro-batch; recomputation is part of it.
  const bool backward = !in_evaluation() && reducer.backward_begun(micro_batches.current());
  set_phase(in_evaluation() ? "evaluate" : backward ? "backward" : "forward", name);
  gatherer.acquire(unit);
  if (!in_inference()) micro_batches.hold(micro_batches.current(), unit);
  note_call(unit, false);
}

void Engine::Impl::note_call(int unit, bool reduces) {
  if (!config.debug.compare_calls || in_evaluation()) return;
  const auto call = static_cast<std::uint64_t>(unit) * 2 + (reduces ? 1 : 0);
  call_order = (call_order ^ (call + 1)) * 1099511628211ull;  // FNV-1a
}

void Engine::Impl::release(std::int64_t micro_batch, int unit, bool unwinding) noexcept {
  using Ahead = ParameterGatherer::Ahead;
  try {
    micro_batches.let_go(micro_batch, unit);
    gatherer.release(unit, unwinding ? Ahead::later : breakdown.ended() ? Ahead::never : Ahead::now);
  } catch (...) {
    // A handle's release must not throw; the next call does.
    breakdown.end(std::current_exception());
  }
}

void Engine::Impl::open_gradients(int unit) {
  const std::string& name = store.units()[static_cast<std::size_t>(unit)].name;
  require(in_pass() && !in_evaluation(), "gradients(" + name + ") outside a training micro-batch");
  const std::int64_t micro_batch = micro_batches.current();
  reducer.check_open(micro_batch, unit);
  if (const std::int64_t earlier = reducer.first_owing(unit); earlier >= 0 && earlier < micro_batch) {
    throw LogicError("gradients(" + name + ") of micro-batch " + std::to_string(micro_batch) +
                     " before micro-batch " + std::to_string(earlier) +
                     " has submitted its own: a unit takes gradients in ascending micro-batches");
  }
  set_phase("backward", name);
  if (config.wall_clock_breakdown) recorder.pass_times().turn();
  reducer.open(micro_batch, unit);
}

void Engine::Impl::submit_gradients(std::int64_t micro_batch, int unit) {
  reducer.submit(micro_batch, unit, /*last=*/micro_batch + 1 == config.accumulation_steps);
  note_call(unit, true);
}

void Engine::Impl::drop_gradients(std::int64_t micro_batch, int unit, bool unwinding) noexcept {
  const std::string& name = store.units()[static_cast<std::size_t>(unit)].name;
  reducer.drop(micro_batch, unit);
  // Its peers are in the reduction of this unit, or will be: they hear of it before the exception is handled.
  if (unwinding) breakdown.end_by_unwinding("while it held the gradients of unit " + name);
  try {
    failure = "gradients of unit " + name + " were dropped in micro-batch " + std::to_string(micro_batch) +
              " without reduce()";
  } catch (...) {
    failure.clear();
  }
}

// --- GatheredUnit ---------------------------------------------------------------------------------------

GatheredUnit::GatheredUnit(GatheredUnit&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)),
      unit_(other.unit_),
      micro_batch_(other.micro_batch_),
      exceptions_(other.exceptions_) {}

GatheredUnit& GatheredUnit::operator=(GatheredUnit&& other) noexcept {
  if (this != &other) {
    release();
    engine_ = std::exchange(other.engine_, nullptr);
    unit_ = other.unit_;
    micro_batch_ = other.micro_batch_;
    exceptions_ = other.exceptions_;
  }
  return *this;
}

void GatheredUnit::release() noexcept {
  if (engine_ == nullptr) return;
  engine_->impl_->release(micro_batch_, unit_, std::uncaught_exceptions() > exceptions_);
  engine_ = nullptr;
}

ConstTensorView GatheredUnit::tensor(int index) const {
  if (engine_ == nullptr) throw LogicError("tensor() of a gathered unit that was released");
  return engine_->impl_->gatherer.view(unit_, index);
}

ConstTensorView GatheredUnit::tensor(std::string_view name) const {
  if (engine_ == nullptr) throw LogicError("tensor() of a gathered unit that was released");
  return tensor(engine_->impl_->store.index_in_unit(unit_, name));
}

const UnitSpec& GatheredUnit::spec() const {
  if (engine_ == nullptr) throw LogicError("spec() of a gathered unit that was released");
  return engine_->impl_->model.unit({unit_});
}

// --- InferenceScope -------------------------------------------------------------------------------------

InferenceScope::InferenceScope(Engine& engine, const Shape& shape)
    : engine_(engine), exceptions_(std::uncaught_exceptions()) {
  engine.impl_->guarded([&] { engine.impl_->begin_inference(shape); });
}

InferenceScope::~InferenceScope() {
  engine_.impl_->end_inference(std::uncaught_exceptions() > exceptions_);
}

StepGuard::~StepGuard() {
  engine_.impl_->abandon_step();
}

// --- UnitGradients --------------------------------------------------------------------------------------

UnitGradients::UnitGradients(UnitGradients&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)),
      unit_(other.unit_),
      micro_batch_(other.micro_batch_),
      exceptions_(other.exceptions_) {}

UnitGradients::~UnitGradients() {
  if (engine_ != nullptr) {
    engine_->impl_->drop_gradients(micro_batch_, unit_, std::uncaught_exceptions() > exceptions_);
  }
}

TensorView UnitGradients::tensor(int index) const {
  if (engine_ == nullptr) throw LogicError("tensor() of gradients that were handed over");
  return engine_->impl_->reducer.view(micro_batch_, unit_, index);
}

GradientTarget UnitGradients::target(int index) const {
  if (engine_ == nullptr) throw LogicError("target() of gradients that were handed over");
  return engine_->impl_->reducer.target(micro_batch_, unit_, index);
}

TensorView UnitGradients::tensor(std::string_view name) const {
  if (engine_ == nullptr) throw LogicError("tensor() of gradients that were handed over");
  return tensor(engine_->impl_->store.index_in_unit(unit_, name));
}

bool UnitGradients::wanted(int index) const {
  if (engine_ == nullptr) throw LogicError("wanted() of gradients that were handed over");
  return !engine_->impl_->store.tensor_in_unit(unit_, index).frozen;
}

const UnitSpec& UnitGradients::spec() const {
  if (engine_ == nullptr) throw LogicError("spec() of gradients that were handed over");
  return engine_->impl_->model.unit({unit_});
}

void UnitGradients::reduce() && {
  if (engine_ == nullptr) throw LogicError("reduce() of gradients that were handed over already");
  Engine* engine = engine_;
  engine_ = nullptr;
  engine->impl_->guarded([&] { engine->impl_->submit_gradients(micro_batch_, unit_); });
}

}  // namespace tranche
