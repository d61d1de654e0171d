#include "tranche/engine/lora.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <utility>

#include "core/closest_match.h"
#include "tranche/core/error.h"
#include "tranche/engine/model_spec.h"
#include "tranche/optim/parameter_groups.h"

namespace tranche {

namespace {

constexpr std::string_view weight_suffix = ".weight", all_linear = "all-linear";
/// Dropout sites above those that models use.
constexpr std::uint32_t first_site = 1u << 31;

std::string without_suffix(const std::string& name) {
  return name.ends_with(weight_suffix) ? name.substr(0, name.size() - weight_suffix.size()) : name;
}

bool is_head(const ModelSpec& model, const UnitSpec& unit, const TensorSpec& tensor) {
  // The head is a tied table, or the linear layer of a last unit named "head".
  return !tensor.aliases.empty() || (&unit == &model.units().back() && unit.name == "head");
}

bool matches_target(const std::string& linear, const std::string& target) {
  return matches_pattern(linear, target) || matches_pattern(linear, "*." + target);
}

/// Throws for a target that matched no layer.
void require_match(const ModelSpec& model, const std::string& target) {
  std::vector<std::string> names;
  for (const UnitSpec& unit : model.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      if (const std::string name = linear_name(tensor); !name.empty()) names.push_back(name);
      if (tensor.linear != LinearLayout::out_in || tensor.aliases.empty()) continue;
      if (!matches_target(without_suffix(tensor.name), target)) continue;
      throw ConfigurationError(
          fmt::format("tranche.lora.targets: '{}' is an embedding, and adapters are for linear layers; the "
                      "head that is tied to it is '{}'",
                      target, linear_name(tensor)));
    }
  }
  if (names.empty()) {
    throw ConfigurationError(
        "tranche.lora: the model names no linear layers (TensorSpec::linear), so there is nothing to add "
        "adapters to");
  }
  std::vector<std::string> ends;
  for (const std::string& name : names) ends.push_back(name.substr(name.rfind('.') + 1));
  std::string closest = detail::closest_match(target, ends);
  if (closest.empty()) closest = detail::closest_match(target, names);
  throw ConfigurationError(fmt::format("tranche.lora.targets: '{}' matches no linear layer; {}", target,
                                       closest.empty() ? fmt::format("the first one is '{}'", names.front())
                                                       : fmt::format("did you mean '{}'?", closest)));
}

}  // namespace

std::string linear_name(const TensorSpec& tensor) {
  if (tensor.linear == LinearLayout::none) return {};
  return without_suffix(tensor.aliases.empty() ? tensor.name : tensor.aliases.front());
}

std::string adapter_a_name(std::string_view linear) {
  return fmt::format("{}.lora_A.weight", linear);
}

std::string adapter_b_name(std::string_view linear) {
  return fmt::format("{}.lora_B.weight", linear);
}

ModelSpec with_adapters(ModelSpec model, const LoraConfig& lora) {
  if (const std::string problem = lora.problem(); !problem.empty()) throw ConfigurationError(problem);
  if (!lora.any()) return model;
  ModelSpec result = model.without_units();  // adapters need no messages beyond those of their layers
  std::vector<bool> matched(lora.targets.size(), false);
  std::uint32_t site = first_site;
  for (const UnitSpec& of : model.units()) {
    UnitSpec unit = of;
    for (TensorSpec& tensor : unit.tensors) tensor.frozen = true;
    for (std::size_t i = 0; i < of.tensors.size(); ++i) {
      const TensorSpec& tensor = of.tensors[i];
      const std::string name = linear_name(tensor);
      if (name.empty()) continue;
      bool wanted = false;
      for (std::size_t t = 0; t < lora.targets.size(); ++t) {
        const bool match = lora.targets[t] == all_linear ? !is_head(model, of, tensor)
                                                         : matches_target(name, lora.targets[t]);
        if (match) matched[t] = wanted = true;
      }
      if (!wanted) continue;
      const bool in_out = tensor.linear == LinearLayout::in_out;
      const std::int64_t in = tensor.shape[in_out ? 0 : 1], out = tensor.shape[in_out ? 1 : 0];
      const auto first = static_cast<int>(unit.tensors.size());
      const float bound = 1 / std::sqrt(static_cast<float>(in));
      unit.tensors.push_back({adapter_a_name(name), {lora.rank, in}, Initializer::uniform(-bound, bound)});
      unit.tensors.push_back({adapter_b_name(name), {out, lora.rank}, Initializer::zeros()});
      for (const int factor : {first, first + 1}) {
        TensorSpec& adapter = unit.tensors[static_cast<std::size_t>(factor)];
        adapter.matrices = 1;
        // A is cut like the layer's inputs and B like its outputs, so that each rank of the axis `tensor`
        // multiplies its own parts.
        if (!tensor.dimensions.empty()) {
          const bool is_a = factor == first;
          const Dimension& with = tensor.dimensions[in_out == is_a ? 0 : 1];
          adapter.dimensions = is_a ? std::vector<Dimension>{{}, with} : std::vector<Dimension>{with, {}};
        }
        // A weight that is tied to an embedding is a linear layer only in its last use.
        if (unit.uses_per_micro_batch > 1) adapter.uses = {unit.uses_per_micro_batch - 1};
      }
      unit.adapters.push_back({.weight = static_cast<int>(i),
                               .a = first,
                               .b = first + 1,
                               .scale = lora.scale(),
                               .dropout = static_cast<float>(lora.dropout),
                               .site = site++});
    }
    result.add_unit(std::move(unit));
  }
  for (std::size_t t = 0; t < matched.size(); ++t) {
    if (!matched[t]) require_match(model, lora.targets[t]);
  }
  return result;
}

}  // namespace tranche
