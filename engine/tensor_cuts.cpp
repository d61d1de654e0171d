#include "engine/tensor_cuts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

/// The number of grains of a tensor's cut dimension, with its name.
struct NamedGrains {
  std::string name;
  std::int64_t grains = 0;
};

/// True if `ranks` can divide the dimension's grains.
bool can_share(const NamedGrains& dimension, int ranks) {
  if (dimension.name == "heads") return dimension.grains % ranks == 0;
  if (dimension.name == "key_value_heads") {
    return dimension.grains % ranks == 0 || ranks % dimension.grains == 0;
  }
  return dimension.grains >= ranks;
}

/// "1, 2, 3 or 6": the numbers of ranks that can divide all dimensions.
std::string sizes_of(const std::vector<NamedGrains>& dimensions) {
  std::int64_t most = dimensions.front().grains;
  for (const NamedGrains& one : dimensions) {
    if (one.name != "key_value_heads") most = std::min(most, one.grains);
  }
  std::vector<std::string> sizes;
  for (int ranks = 1; ranks <= std::min<std::int64_t>(most, 4096); ++ranks) {
    if (std::all_of(dimensions.begin(), dimensions.end(),
                    [&](const NamedGrains& one) { return can_share(one, ranks); })) {
      sizes.push_back(std::to_string(ranks));
    }
  }
  constexpr std::size_t shown = 12;
  if (sizes.size() > shown) return fmt::format("at most {}", sizes.back());
  std::string text;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == sizes.size() ? " or " : ", ") + sizes[i];
  }
  return text;
}

using Names = std::vector<std::string>;

bool is_among(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// "heads, inner and vocabulary"; "none" without names.
std::string list_of(const Names& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == names.size() ? " and " : ", ") + names[i];
  }
  return text.empty() ? "none" : text;
}

std::string title_of(const ModelSpec& model) {
  return model.name.empty() ? "the model" : model.name;
}

/// Names of all dimensions of the model's tensors, in order of first appearance.
Names dimensions_of(const ModelSpec& model) {
  Names names;
  for (const UnitSpec& unit : model.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      for (const Dimension& one : tensor.dimensions) {
        if (!one.name.empty() && !is_among(names, one.name)) names.push_back(one.name);
      }
    }
  }
  return names;
}

/// The names of the dimensions to cut: the model's, as modified by the layout.
Names names_to_cut(const ModelSpec& model, const Config& config) {
  Names cut = model.tensor_dimensions;
  if (config.layout.empty()) return cut;
  const Names known = dimensions_of(model);
  for (const auto& [name, place] : config.layout) {
    if (!is_among(known, name)) {
      throw ConfigurationError(fmt::format("tranche.layout: {} has no dimension '{}'; its dimensions are: {}",
                                           title_of(model), name, list_of(known)));
    }
    if (place == "tensor") {
      if (!is_among(cut, name)) cut.push_back(name);
    } else if (is_among(model.tensor_dimensions, name)) {
      if (!is_among(model.whole_dimensions, name)) {
        throw ConfigurationError(
            fmt::format("tranche.layout: {} cannot compute with {} whole on every rank of tensor; dimensions "
                        "that can be whole are: {}",
                        title_of(model), name, list_of(model.whole_dimensions)));
      }
      std::erase(cut, name);
    }
  }
  return cut;
}

/// Refuses a dimension that the layout assigns to the axis but the model cannot compute in parts.
void require_computed(const ModelSpec& model, const Names& cut) {
  for (const std::string& name : cut) {
    if (is_among(model.tensor_dimensions, name)) continue;
    throw ConfigurationError(fmt::format(
        "tranche.layout: {} computes no parts of {}; dimensions that the axis tensor can cut are: {}",
        title_of(model), name, list_of(model.tensor_dimensions)));
  }
}

}  // namespace

std::vector<TensorCut> tensor_cuts(const ModelSpec& model, const Config& config, int ranks) {
  const Names names = names_to_cut(model, config);
  if (ranks == 1) return {};
  const std::string mesh = fmt::format("tranche.mesh \"{}\": ", config.mesh);
  const auto is_cut = [&](const Dimension& one) { return !one.name.empty() && is_among(names, one.name); };
  std::vector<TensorCut> cuts;
  std::vector<NamedGrains> dimensions;  // cut, or whole with work that ranks divide
  bool any_cut = false;
  for (const UnitSpec& unit : model.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      TensorCut& cut = cuts.emplace_back();
      for (std::size_t d = 0; d < tensor.dimensions.size(); ++d) {
        const Dimension& one = tensor.dimensions[d];
        const bool left_whole = !is_cut(one) && is_among(model.tensor_dimensions, one.name);
        if (!is_cut(one) && !left_whole) continue;
        if (!left_whole && !cut.whole()) {
          throw ConfigurationError(fmt::format(
              "{}tensor {} has two dimensions that the axis tensor cuts, {} and {}; it can cut only one of "
              "them",
              mesh, tensor.name, tensor.dimensions[static_cast<std::size_t>(cut.axis)].name, one.name));
        }
        const TensorCut along{static_cast<int>(d), one.blocks, one.grain};
        if (!left_whole) cut = along;
        any_cut = any_cut || !left_whole;
        const NamedGrains named{one.name, grains_of(tensor.shape, along)};
        if (std::none_of(dimensions.begin(), dimensions.end(), [&](const NamedGrains& other) {
              return other.name == named.name && other.grains == named.grains;
            })) {
          dimensions.push_back(named);
        }
      }
    }
  }
  require_computed(model, names);
  const std::string name = title_of(model);
  if (!any_cut && !dimensions.empty()) {
    throw ConfigurationError(
        fmt::format("{}tranche.layout leaves whole all dimensions of {} that the axis tensor can cut, so all "
                    "{} ranks would compute the same; leave one of {} out of the layout",
                    mesh, name, ranks, list_of(model.whole_dimensions)));
  }
  if (dimensions.empty()) {
    throw ConfigurationError(
        fmt::format("{}{} names no dimension that the axis tensor can cut (ModelSpec::tensor_dimensions), so "
                    "all {} ranks would compute the same; leave tensor out",
                    mesh, name, ranks));
  }
  for (const NamedGrains& one : dimensions) {
    if (can_share(one, ranks)) continue;
    const bool heads = one.name == "heads" || one.name == "key_value_heads";
    const std::string what = one.name == "key_value_heads" ? "key and value heads" : one.name;
    throw ConfigurationError(fmt::format("{}{} has {}, which {} ranks cannot share; tensor can be {}", mesh,
                                         name,
                                         heads ? fmt::format("{} {}", one.grains, what)
                                               : fmt::format("a dimension {} of {}", one.name, one.grains),
                                         ranks, sizes_of(dimensions)));
  }
  return cuts;
}

}  // namespace tranche::detail
