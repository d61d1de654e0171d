#pragma once
/// Calls of units in autograd's graph.
///
/// Autograd numbers the nodes of a graph in the order of forward, and runs ready nodes in descending order of
/// these numbers. Each node leads only to older ones, so with one queue all nodes run in descending order.
/// Therefore each call of a unit has two marks: nodes that are roots of backward beside the loss. The younger
/// mark runs just before the nodes of the call and gathers the unit; the older one runs just after them and
/// reduces the gradients. So gathers and reductions happen in the reverse order of the calls on every rank,
/// even if some results do not contribute to the loss there:
///
///   forward    older mark | nodes of the call | younger mark
///   backward   younger mark: gather -> nodes of the call -> older mark: gradients

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/libtorch/detail/tensors.h"
#include "tranche/libtorch/detail/unit_state.h"

namespace tranche::libtorch::detail {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline UnitState& unit_of(AutogradContext* context) {
  return *reinterpret_cast<UnitState*>(context->saved_data["unit"].toInt());
}

struct Mark : torch::autograd::Function<Mark> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& anchor, UnitState* unit, bool end) {
    context->saved_data["unit"] = reinterpret_cast<std::int64_t>(unit);
    context->saved_data["end"] = end;
    return anchor.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& /*gradients*/) {
    UnitState& unit = unit_of(context);
    if (context->saved_data["end"].toBool()) {
      unit.gather();  // backward begins at the end of forward
    } else {
      unit.end_call();
    }
    return {at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

/// The states of torch's random generators, saved so that recomputed dropout drops the same elements.
class GeneratorStates {
 public:
  explicit GeneratorStates(at::Device device) {
    add(at::kCPU);
    if (!device.is_cpu()) add(device);
  }
  void set() const {
    for (const auto& [device, state] : states_) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  void add(at::Device device) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    at::Generator copy = generator;
    const std::lock_guard lock(copy.mutex());
    states_.emplace_back(device, copy.get_state());
  }
  std::vector<std::pair<at::Device, at::Tensor>> states_;
};

/// A call as a function of the tensors in its arguments, which can be run again.
struct Body : torch::CustomClassHolder {
  explicit Body(std::function<variable_list(const variable_list&)> f, at::Device device)
      : function(std::move(f)), states(device) {}
  std::function<variable_list(const variable_list&)> function;
  GeneratorStates states;
};

struct Recompute : torch::autograd::Function<Recompute> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs,
                               const at::Tensor& /*anchor: the node exists whatever the inputs*/,
                               UnitState* unit, const c10::intrusive_ptr<Body>& body) {
    context->saved_data["unit"] = reinterpret_cast<std::int64_t>(unit);
    context->saved_data["body"] = c10::IValue::make_capsule(body);
    c10::List<bool> differentiable;
    for (const at::Tensor& input : inputs) differentiable.push_back(input.requires_grad());
    context->saved_data["differentiable"] = std::move(differentiable);
    context->set_materialize_grads(false);
    context->save_for_backward(inputs.vec());
    Pass& pass = unit->pass();
    const bool before = std::exchange(pass.first_run, true);
    const UnitState::Held held(*unit);
    variable_list outputs = body->function(inputs.vec());
    pass.first_run = before;
    return outputs;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    UnitState& unit = unit_of(context);
    Pass& pass = unit.pass();
    const auto body = c10::static_intrusive_pointer_cast<Body>(context->saved_data["body"].toCapsule());
    const auto differentiable = context->saved_data["differentiable"].toBoolList();
    variable_list inputs;
    for (const at::Tensor& saved : context->get_saved_variables()) {
      inputs.push_back(saved.detach());
      if (differentiable.get(inputs.size() - 1)) inputs.back().requires_grad_();
    }
    std::vector<at::Tensor> outer = std::exchange(pass.marks, {});
    variable_list roots, root_gradients;
    {
      const UnitState::Held held(unit);
      const GeneratorStates now(pass.anchor.device());
      body->states.set();
      const at::AutoGradMode grad(true);
      const variable_list outputs = body->function(inputs);
      now.set();
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (!outputs[i].requires_grad() || !gradients[i].defined()) continue;
        roots.push_back(outputs[i]);
        root_gradients.push_back(gradients[i]);
      }
      for (const at::Tensor& mark : pass.marks) {  // marks of units inside this one
        roots.push_back(mark);
        root_gradients.push_back(at::ones_like(mark));
      }
      if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    }
    pass.marks = std::move(outer);
    variable_list results;
    for (const at::Tensor& input : inputs) results.push_back(input.grad());
    results.resize(inputs.size() + 3);
    return results;
  }
};

/// Makes a Body from the call. It keeps no tensor of the first run, since Recompute saves them.
template <class Function, class Arguments, class Result>
c10::intrusive_ptr<Body> body_of(Function function, Arguments arguments,
                                 std::shared_ptr<std::optional<Result>> first, at::Device device) {
  const auto shape = std::make_shared<Arguments>(std::move(arguments));
  const at::Tensor none = at::empty({0});
  for_each_tensor(*shape, [&](at::Tensor& tensor) { tensor = none; });
  return c10::make_intrusive<Body>(
      [function = std::move(function), shape, first](const variable_list& inputs) mutable {
        Arguments mine = *shape;
        std::size_t at = 0;
        for_each_tensor(mine, [&](at::Tensor& tensor) { tensor = inputs[at++]; });
        Result result = std::apply(function, mine);
        variable_list outputs;
        for_each_tensor(result, [&](at::Tensor& tensor) { outputs.push_back(tensor); });
        if (first) *std::exchange(first, nullptr) = std::move(result);
        return outputs;
      },
      device);
}

/// Adds a node before those of the call. If the user's code runs backward itself, the weights are not
/// gathered, and this node throws an error that names the remedy.
inline void expect_backward_of_trainer(UnitState& unit, const at::Tensor& result) {
  if (!result.requires_grad()) return;
  result.register_hook([by_trainer = unit.pass().backward, path = unit.path()](const at::Tensor& gradient) {
    if (*by_trainer) return gradient;
    throw LogicError("backward() came through unit " + path +
                     " inside the closure: leave it out and return the loss, the trainer goes back itself");
  });
}

/// Calls function(arguments...) with the unit gathered, and arranges that backward finds the unit gathered as
/// well.
template <class Function, class... Arguments>
auto run(UnitState& unit, Function function, Arguments&&... arguments) {
  using Result = std::decay_t<std::invoke_result_t<Function&, std::decay_t<Arguments>&...>>;
  static_assert(!std::is_void_v<Result>,
                "a unit returns its results: a tensor, or a tuple or vector of some");
  Pass& pass = unit.pass();
  std::tuple<std::decay_t<Arguments>...> mine(std::forward<Arguments>(arguments)...);
  const bool evaluating = pass.engine->evaluating();
  variable_list inputs;
  bool wanted = unit.trainable();
  for_each_tensor(mine, [&](at::Tensor& tensor) {
    inputs.push_back(tensor);
    wanted = wanted || tensor.requires_grad();
  });
  if (!at::GradMode::is_enabled() || evaluating || !wanted) {
    if (pass.first_run && !evaluating) unit.expect_call();
    const at::AutoGradMode grad(at::GradMode::is_enabled() && !evaluating && wanted);
    const UnitState::Held held(unit);
    return Result(std::apply(function, mine));
  }
  unit.expect_call();
  pass.marks.push_back(Mark::apply(pass.anchor, &unit, false));
  std::optional<Result> result;
  if (unit.recompute()) {
    const auto first = std::make_shared<std::optional<Result>>();
    const auto body = body_of(std::move(function), std::move(mine), first, pass.anchor.device());
    const variable_list outputs = Recompute::apply(at::TensorList(inputs), pass.anchor, &unit, body);
    result = std::move(*first);
    std::size_t at = 0;
    for_each_tensor(*result, [&](at::Tensor& tensor) { tensor = outputs[at++]; });
  } else {
    const UnitState::Held held(unit);
    result.emplace(std::apply(function, mine));
  }
  pass.marks.push_back(Mark::apply(pass.anchor, &unit, true));
  for_each_tensor(*result, [&](at::Tensor& tensor) { expect_backward_of_trainer(unit, tensor); });
  return std::move(*result);
}

}  // namespace tranche::libtorch::detail
