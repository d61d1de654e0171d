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

/// The grains of a dimension that is cut, as a tensor has it.
struct NamedGrains {
  std::string name;
  std::int64_t grains = 0;
};

/// Whether `ranks` can share the grains of a dimension.
bool can_share(const NamedGrains& dimension, int ranks) {
  if (dimension.name == "heads") return dimension.grains % ranks == 0;
  if (dimension.name == "key_value_heads") {
    return dimension.grains % ranks == 0 || ranks % dimension.grains == 0;
  }
  return dimension.grains >= ranks;
}

/// "1, 2, 3 or 6": the numbers of ranks that can share all dimensions.
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

}  // namespace

std::vector<TensorCut> tensor_cuts(const ModelSpec& model, const Config& config, int ranks) {
  if (ranks == 1) return {};
  const std::string mesh = fmt::format("tranche.mesh \"{}\": ", config.mesh);
  const auto is_cut = [&](const Dimension& one) {
    return !one.name.empty() && std::find(model.tensor_dimensions.begin(), model.tensor_dimensions.end(),
                                          one.name) != model.tensor_dimensions.end();
  };
  std::vector<TensorCut> cuts;
  std::vector<NamedGrains> dimensions;
  for (const UnitSpec& unit : model.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      TensorCut& cut = cuts.emplace_back();
      for (std::size_t d = 0; d < tensor.dimensions.size(); ++d) {
        const Dimension& one = tensor.dimensions[d];
        if (!is_cut(one)) continue;
        if (!cut.whole()) {
          throw ConfigurationError(fmt::format(
              "{}tensor {} has two dimensions that tensor cuts, {} and {}; a tensor can be cut along one",
              mesh, tensor.name, tensor.dimensions[static_cast<std::size_t>(cut.axis)].name, one.name));
        }
        cut = {static_cast<int>(d), one.blocks, one.grain};
        const NamedGrains named{one.name, grains_of(tensor.shape, cut)};
        if (std::none_of(dimensions.begin(), dimensions.end(), [&](const NamedGrains& other) {
              return other.name == named.name && other.grains == named.grains;
            })) {
          dimensions.push_back(named);
        }
      }
    }
  }
  const std::string name = model.name.empty() ? "the model" : model.name;
  if (dimensions.empty()) {
    throw ConfigurationError(
        fmt::format("{}{} names no dimension that tensor cuts (ModelSpec::tensor_dimensions), so all {} "
                    "ranks would compute "
                    "the same; leave tensor out",
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
