// The handles that a model holds.

#include <exception>
#include <utility>

#include "engine/engine_impl.h"
#include "engine/step_guard.h"

namespace tranche {

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
  engine_->impl_->sequence.release(micro_batch_, unit_, std::uncaught_exceptions() > exceptions_);
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
  engine.impl_->guarded([&] { engine.impl_->sequence.begin_inference(shape); });
}

InferenceScope::~InferenceScope() {
  engine_.impl_->sequence.end_inference(std::uncaught_exceptions() > exceptions_);
}

StepGuard::~StepGuard() {
  engine_.impl_->sequence.abandon_step();
}

// --- UnitGradients --------------------------------------------------------------------------------------

UnitGradients::UnitGradients(UnitGradients&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)),
      unit_(other.unit_),
      micro_batch_(other.micro_batch_),
      exceptions_(other.exceptions_) {}

UnitGradients::~UnitGradients() {
  if (engine_ != nullptr) {
    engine_->impl_->sequence.drop_gradients(micro_batch_, unit_, std::uncaught_exceptions() > exceptions_);
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
  engine->impl_->guarded([&] { engine->impl_->sequence.require_turn(micro_batch_, unit_); });
  engine_ = nullptr;
  engine->impl_->guarded([&] { engine->impl_->sequence.submit_gradients(micro_batch_, unit_); });
}

}  // namespace tranche
