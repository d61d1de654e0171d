#pragma once
/// Unit: a module of a model whose parameters are gathered, reduced and freed together.

#include <torch/torch.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "tranche/libtorch/detail/graph.h"

namespace tranche::libtorch {

/// First argument of a Unit whose initial weights are drawn when the Trainer is made. Each rank draws its
/// part, one unit at a time, so that memory never holds the whole model. The module's constructor runs twice
/// with the same random state, so the weights are those of an ordinary Unit. Before there is a Trainer the
/// parameters have shapes but no memory, and values written to them are lost.
struct Deferred {};
inline constexpr Deferred deferred{};

namespace detail {

/// The part of a unit's module through which the Trainer finds the unit.
struct UnitLink {
  UnitLink() = default;
  UnitLink(const UnitLink&) {}  // a clone is a plain module without a unit
  UnitLink& operator=(const UnitLink&) { return *this; }
  virtual ~UnitLink() = default;
  UnitState* state = nullptr;  ///< owned by the Trainer; null: calls go directly to the module
  bool listed = false;         ///< a member of Units
  /// For a deferred unit: rebuilds its module with the same weights.
  std::function<std::shared_ptr<torch::nn::Module>()> rebuild = {};
  std::string born = {};  ///< the random state at its construction, as text
};

template <class Impl>
struct Linked final : Impl, UnitLink {
  template <class... Arguments>
  explicit Linked(Arguments&&... arguments) : Impl(std::forward<Arguments>(arguments)...) {}
};

/// A parameter's shape and dtype without memory.
inline void free_memory(at::Tensor& parameter, const std::string& name) {
  auto storage = null_storage(static_cast<std::int64_t>(parameter.nbytes()), parameter.device());
  parameter.set_data(
      at::empty({0}, parameter.options()).set_(c10::Storage(storage), 0, parameter.sizes(), {}));
  refuse_reads(*storage, "parameter " + name + " of a deferred unit is used before there is a Trainer");
}

}  // namespace detail

/// Holds a module and registers it in its parent: `Unit<torch::nn::Linear> first{this, "first", 8, 16};` as a
/// member of the parent. The name and parameters are the same as without Unit, and a call runs the module's
/// forward(). Under a Trainer the parameters have memory only inside a call, and again in backward if
/// backward reaches the call. Units may contain units; the outer one then holds only parameters that are in
/// no inner one.
///
/// Under a Trainer every rank must make the same calls in the same order. Tensors with which a call computes
/// and which require gradients must be among its arguments, directly or inside vectors, tuples, pairs or
/// optionals.
template <class Holder>
class Unit {
 public:
  using Impl = typename Holder::ContainedType;

  template <class... Arguments>
  Unit(torch::nn::Module* parent, const std::string& name, Arguments&&... arguments)
      : Unit(std::make_shared<detail::Linked<Impl>>(std::forward<Arguments>(arguments)...), parent, name) {}
  template <class... Arguments>
  Unit(Deferred, torch::nn::Module* parent, const std::string& name, Arguments&&... arguments)
      : Unit(build_deferred(std::forward<Arguments>(arguments)...), parent, name) {}

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) const {
    return call([module = module_](auto&... values) mutable { return module->forward(values...); },
                std::forward<Arguments>(arguments)...);
  }
  /// Runs function(module, arguments...) as a call of the unit, for uses of its parameters other than
  /// forward(). Tensors that require gradients must be arguments; a recomputed unit gives no gradient to a
  /// captured tensor.
  template <class Function, class... Arguments>
  auto with(Function function, Arguments&&... arguments) const {
    return call([module = module_, function = std::move(function)](
                    auto&... values) mutable { return function(module, values...); },
                std::forward<Arguments>(arguments)...);
  }
  const Holder& module() const { return module_; }
  Impl* operator->() const { return module_.ptr().get(); }

 private:
  template <class>
  friend class Units;
  Unit(const std::shared_ptr<detail::Linked<Impl>>& made, torch::nn::Module* parent, const std::string& name)
      : link_(made.get()), module_(std::shared_ptr<Impl>(made)) {
    parent->register_module(name, std::static_pointer_cast<Impl>(made));
  }
  template <class... Arguments>
  static std::shared_ptr<detail::Linked<Impl>> build_deferred(Arguments&&... arguments) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const at::Tensor state = generator.get_state();
    std::tuple<std::decay_t<Arguments>...> kept(arguments...);
    auto made = std::make_shared<detail::Linked<Impl>>(std::forward<Arguments>(arguments)...);
    for (auto& item : made->named_parameters()) detail::free_memory(item.value(), item.key());
    made->born = detail::hash_of(state);
    made->rebuild = [kept = std::move(kept), state]() mutable -> std::shared_ptr<torch::nn::Module> {
      at::Generator numbers = at::detail::getDefaultCPUGenerator();
      const at::Tensor now = numbers.get_state();
      numbers.set_state(state);
      auto again = std::apply([](const auto&... values) { return std::make_shared<Impl>(values...); }, kept);
      numbers.set_state(now);
      return again;
    };
    return made;
  }
  template <class Function, class... Arguments>
  auto call(Function function, Arguments&&... arguments) const {
    if (link_->state != nullptr) {
      return detail::run(*link_->state, std::move(function), std::forward<Arguments>(arguments)...);
    }
    std::tuple<std::decay_t<Arguments>...> values(std::forward<Arguments>(arguments)...);
    return std::apply(function, values);
  }

  detail::UnitLink* link_;
  Holder module_;
};

/// `Units<Block> layers{this, "layers", 12, arguments...};` makes the units "layers.0" to "layers.11" with
/// the same arguments. A call passes the result of each unit to the next. Config::activation_checkpointing
/// recomputes them.
template <class Holder>
class Units {
 public:
  template <class... Arguments>
  Units(torch::nn::Module* parent, const std::string& name, std::int64_t count, const Arguments&... arguments)
      : list_(parent->register_module(name, std::make_shared<torch::nn::Module>())) {
    for (std::int64_t i = 0; i < count; ++i) add(list_.get(), std::to_string(i), arguments...);
  }
  template <class... Arguments>
  Units(Deferred, torch::nn::Module* parent, const std::string& name, std::int64_t count,
        const Arguments&... arguments)
      : list_(parent->register_module(name, std::make_shared<torch::nn::Module>())) {
    for (std::int64_t i = 0; i < count; ++i) add(deferred, list_.get(), std::to_string(i), arguments...);
  }

  /// Every unit receives `rest`.
  template <class Value, class... Rest>
  auto operator()(Value value, const Rest&... rest) const {
    for (const Unit<Holder>& unit : units_) value = unit(value, rest...);
    return value;
  }
  const Unit<Holder>& operator[](std::size_t index) const { return units_.at(index); }
  std::size_t size() const { return units_.size(); }
  auto begin() const { return units_.begin(); }
  auto end() const { return units_.end(); }

 private:
  template <class... Arguments>
  void add(Arguments&&... arguments) {
    units_.emplace_back(std::forward<Arguments>(arguments)...);
    units_.back().link_->listed = true;
  }
  std::shared_ptr<torch::nn::Module> list_;
  std::deque<Unit<Holder>> units_;
};

}  // namespace tranche::libtorch
