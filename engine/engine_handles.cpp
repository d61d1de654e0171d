// The handles that a model holds.

#include <exception>
#include <string>
#include <utility>

#include "engine/engine_impl.h"
#include "engine/step_guard.h"

namespace tranche {

namespace {

/// The handle's engine. `call` and `over` ("of gradients that were handed over") are for the error's text.
Engine& engine_of(const std::shared_ptr<Engine*>& engine, const char* call, const char* over) {
  if (engine == nullptr) throw LogicError(std::string(call) + " " + over);
  if (*engine == nullptr) throw LogicError(std::string(call) + " of a handle whose engine has ended");
  return **engine;
}
constexpr const char* released = "of a gathered unit that was released";
constexpr const char* handed_over = "of gradients that were handed over";

}  // namespace

// --- GatheredUnit ---------------------------------------------------------------------------------------

GatheredUnit::GatheredUnit(GatheredUnit&& other) noexcept
    : engine_(std::move(other.engine_)),
      unit_(other.unit_),
      micro_batch_(other.micro_batch_),
      exceptions_(other.exceptions_) {}

GatheredUnit& GatheredUnit::operator=(GatheredUnit&& other) noexcept {
  if (this != &other) {
    release();
    engine_ = std::move(other.engine_);
    unit_ = other.unit_;
    micro_batch_ = other.micro_batch_;
    exceptions_ = other.exceptions_;
  }
  return *this;
}

void GatheredUnit::release() noexcept {
  if (engine_ != nullptr && *engine_ != nullptr) {
    (*engine_)->impl_->sequence.release(micro_batch_, unit_, std::uncaught_exceptions() > exceptions_);
  }
  engine_.reset();
}

ConstTensorView GatheredUnit::tensor(int index) const {
  const Engine& engine = engine_of(engine_, "tensor()", released);
  return engine.impl_->gatherer.view(unit_, index);
}

ConstTensorView GatheredUnit::tensor(std::string_view name) const {
  const Engine& engine = engine_of(engine_, "tensor()", released);
  return tensor(engine.impl_->store.index_in_unit(unit_, name));
}

const UnitSpec& GatheredUnit::spec() const {
  const Engine& engine = engine_of(engine_, "spec()", released);
  return engine.impl_->model.unit({unit_});
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
    : engine_(std::move(other.engine_)),
      unit_(other.unit_),
      micro_batch_(other.micro_batch_),
      exceptions_(other.exceptions_) {}

UnitGradients::~UnitGradients() {
  if (engine_ == nullptr || *engine_ == nullptr) return;
  (*engine_)->impl_->sequence.drop_gradients(micro_batch_, unit_, std::uncaught_exceptions() > exceptions_);
}

TensorView UnitGradients::tensor(int index) const {
  const Engine& engine = engine_of(engine_, "tensor()", handed_over);
  return engine.impl_->reducer.view(micro_batch_, unit_, index);
}

GradientTarget UnitGradients::target(int index) const {
  const Engine& engine = engine_of(engine_, "target()", handed_over);
  return engine.impl_->reducer.target(micro_batch_, unit_, index);
}

TensorView UnitGradients::tensor(std::string_view name) const {
  const Engine& engine = engine_of(engine_, "tensor()", handed_over);
  return tensor(engine.impl_->store.index_in_unit(unit_, name));
}

bool UnitGradients::wanted(int index) const {
  const Engine& engine = engine_of(engine_, "wanted()", handed_over);
  return !engine.impl_->store.tensor_in_unit(unit_, index).frozen;
}

const UnitSpec& UnitGradients::spec() const {
  const Engine& engine = engine_of(engine_, "spec()", handed_over);
  return engine.impl_->model.unit({unit_});
}

void UnitGradients::reduce() && {
  Engine& engine = engine_of(engine_, "reduce()", "of gradients that were handed over already");
  engine.impl_->guarded([&] { engine.impl_->sequence.require_turn(micro_batch_, unit_); });
  engine_.reset();
  engine.impl_->guarded([&] { engine.impl_->sequence.submit_gradients(micro_batch_, unit_); });
}

}  // namespace tranche
