#pragma once
/// Registers the units of a model with the engine.

#include <torch/torch.h>

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tranche/engine/engine.h"
#include "tranche/engine/model_spec.h"
#include "tranche/engine/runtime.h"
#include "tranche/libtorch/detail/initial_weights.h"
#include "tranche/libtorch/options.h"
#include "tranche/libtorch/unit.h"
#include "tranche/optim/parameter_groups.h"

namespace tranche::libtorch::detail {

class ModelUnits {
 public:
  /// Throws InvalidArgument for a parameter in no unit and for a pattern that matches no unit.
  ModelUnits(torch::nn::Module& model, Pass& pass, const std::vector<std::string>& recompute,
             bool recompute_lists) {
    find_units(model, pass, recompute, recompute_lists);
    for (auto& item : model.named_parameters()) add(item.key(), item.value());
    for (const Found& found : found_) {
      if (!found.state->parameters().empty()) found.link->state = found.state;
    }
  }
  ~ModelUnits() {
    for (const Found& found : found_) found.link->state = nullptr;
    for (UnitState& unit : units_) unit.abandon();
  }
  ModelUnits(const ModelUnits&) = delete;
  ModelUnits& operator=(const ModelUnits&) = delete;

  /// Appends the parameters without requires_grad to `frozen`. The parameters' present values are the initial
  /// ones, and are read until adopt(). Throws InvalidArgument for an entry of `matrices` that matches none.
  ModelSpec spec(std::vector<std::string>& frozen, const std::vector<MatrixNames>& matrices) {
    ModelSpec spec;
    std::vector<bool> used(matrices.size(), false);
    const auto rebuilt = std::make_shared<Rebuilt>();
    for (const Found& found : found_) {
      UnitSpec unit{.name = found.state->path(), .tensors = {}};
      for (const Parameter& p : found.state->parameters()) {
        Initializer values = initializer(*found.link, p, rebuilt);
        for (const char c : values.name)
          initial_ = (initial_ ^ static_cast<unsigned char>(c)) * 1099511628211ull;
        unit.tensors.push_back({p.name, shape_of(p.tensor), std::move(values), p.aliases});
        unit.tensors.back().matrices = matrices_in(p, matrices, used);
        if (!p.tensor.requires_grad()) frozen.push_back(p.name);
      }
      if (!unit.tensors.empty()) found.state->set_id(spec.add_unit(std::move(unit)));
    }
    for (std::size_t i = 0; i < used.size(); ++i) {
      if (!used[i]) {
        throw InvalidArgument("matrices: '" + matrices[i].pattern + "' names no parameter of two dimensions");
      }
    }
    return spec;
  }
  /// Collective, after spec(). Throws if the initial values differ between ranks. The engine checks that as
  /// well, but cannot name their source.
  void require_equal_values(Runtime& runtime) const {
    std::vector<std::uint64_t> all(static_cast<std::size_t>(runtime.size()), initial_);
    runtime.all()
        .all_gather(&initial_, all.data(), sizeof(initial_), DataType::uint8, 0, {},
                    OperationLabel{"initial weights", "start", Traffic::control, Tier::host})
        .wait();
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      if (all[rank] == all[0]) continue;
      throw ConfigurationError(
          "rank " + std::to_string(rank) +
          " starts with other weights than rank 0: seed torch alike "
          "on all ranks (torch::manual_seed) before the module is made, or load the same file");
    }
  }
  /// Call before adopt(): autograd then skips the parameters in tranche.frozen, as it skips those that the
  /// module froze.
  void freeze(const Engine& engine) {
    for (UnitState& unit : units_) {
      unit.freeze([&](const std::string& name) { return engine.frozen(name); });
    }
  }
  void adopt(at::ScalarType type, at::Device device) {
    for (UnitState& unit : units_) unit.adopt(type, device);
  }
  /// All units in the order of registration, including those without parameters.
  std::deque<UnitState>& all() { return units_; }

 private:
  struct Found {
    UnitLink* link;
    UnitState* state;
  };

  void find_units(torch::nn::Module& model, Pass& pass, const std::vector<std::string>& recompute,
                  bool recompute_lists) {
    std::vector<bool> used(recompute.size(), false);
    std::string names;
    for (auto& item : model.named_modules("", /*include_self=*/false)) {
      auto* link = dynamic_cast<UnitLink*>(item.value().get());
      if (link == nullptr || (!found_.empty() && has(link))) continue;
      if (link->state != nullptr) {
        throw LogicError("unit " + item.key() + " is another Trainer's: a model has one at a time");
      }
      bool again = recompute_lists && link->listed;
      for (std::size_t i = 0; i < recompute.size(); ++i) {
        if (!matches_pattern(item.key(), recompute[i])) continue;
        again = used[i] = true;
      }
      found_.push_back({link, &units_.emplace_back(pass, item.key(), again)});
      names += (names.empty() ? "" : ", ") + item.key();
    }
    if (found_.empty())
      throw InvalidArgument("the model has no units: hold its modules in Unit<> or Units<>");
    for (std::size_t i = 0; i < recompute.size(); ++i) {
      if (!used[i])
        throw InvalidArgument("recompute: '" + recompute[i] + "' names none of the units " + names);
    }
  }
  bool has(const UnitLink* link) const {
    for (const Found& found : found_) {
      if (found.link == link) return true;
    }
    return false;
  }

  static int matrices_in(const Parameter& p, const std::vector<MatrixNames>& matrices,
                         std::vector<bool>& used) {
    if (p.tensor.dim() != 2) return 0;
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      if (!matches_pattern(p.name, matrices[i].pattern)) continue;
      used[i] = true;
      return matrices[i].side_by_side;
    }
    return 0;
  }

  void add(const std::string& name, const at::Tensor& tensor) {
    const auto [seen, fresh] = parameters_.try_emplace(tensor.unsafeGetTensorImpl());
    if (!fresh) {
      UnitState& unit = *seen->second.first;
      unit.parameters()[seen->second.second].aliases.push_back(name);
      return;
    }
    UnitState* owner = nullptr;
    for (UnitState& unit : units_) {
      const bool inside = name.rfind(unit.path() + ".", 0) == 0;
      if (inside && (owner == nullptr || unit.path().size() > owner->path().size())) owner = &unit;
    }
    if (owner == nullptr) {
      throw InvalidArgument("parameter " + name +
                            " lies in no unit: hold its module, or one around it, in a "
                            "Unit<>");
    }
    if (!at::isFloatingType(tensor.scalar_type())) {
      throw InvalidArgument("parameter " + name + " has dtype " + c10::toString(tensor.scalar_type()) +
                            "; parameters are floating-point, other tensors are buffers");
    }
    seen->second = {owner, owner->parameters().size()};
    owner->add(name, tensor);
  }

  std::deque<UnitState> units_;
  std::vector<Found> found_;
  std::uint64_t initial_ = 1469598103934665603ull;  ///< a hash of the initial values
  std::map<c10::TensorImpl*, std::pair<UnitState*, std::size_t>> parameters_;
};

}  // namespace tranche::libtorch::detail
