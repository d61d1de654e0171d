#include "engine/context_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "partition/slices.h"
#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

/// The number of heads of dimension `name` on each rank of the axis `tensor`; 0: no tensor has the dimension.
std::int64_t heads_of_rank(const ModelSpec& model, std::string_view name, int tensor_ranks) {
  for (const UnitSpec& unit : model.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      for (std::size_t d = 0; d < tensor.dimensions.size(); ++d) {
        const Dimension& one = tensor.dimensions[d];
        if (one.name != name) continue;
        const std::int64_t heads = grains_of(tensor.shape, {static_cast<int>(d), one.blocks, one.grain});
        return std::max<std::int64_t>(1, heads / tensor_ranks);
      }
    }
  }
  return 0;
}

/// ", or a context of 2, 3 or 6": the sizes above 1 that divide both numbers; empty if there are none.
std::string other_sizes(std::int64_t heads, std::int64_t key_value_heads) {
  std::vector<std::string> sizes;
  for (std::int64_t size = 2; size <= heads; ++size) {
    if (heads % size == 0 && key_value_heads % size == 0) sizes.push_back(std::to_string(size));
  }
  std::string text;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? ", or a context of " : i + 1 == sizes.size() ? " or " : ", ") + sizes[i];
  }
  return text;
}

void check_heads(const ModelSpec& model, const Config& config, const Mesh& mesh) {
  const int ranks = mesh.size(MeshAxis::context), tensor_ranks = mesh.size(MeshAxis::tensor);
  const std::int64_t heads = heads_of_rank(model, "heads", tensor_ranks);
  const std::int64_t of_keys = heads_of_rank(model, "key_value_heads", tensor_ranks);
  const std::int64_t key_value_heads = of_keys > 0 ? of_keys : heads;
  for (const auto& [count, what] :
       {std::pair(heads, "head"), std::pair(key_value_heads, "key and value head")}) {
    if (count % ranks == 0) continue;
    throw ConfigurationError(fmt::format(
        "tranche.context_exchange {} with context={}: {} {}{}{} cannot be shared by {} ranks; use "
        "gather{}",
        name_of(config.context_exchange), ranks, count, what, count == 1 ? "" : "s",
        tensor_ranks > 1 ? " of a rank of tensor" : "", ranks, other_sizes(heads, key_value_heads)));
  }
}

}  // namespace

void check_context(const ModelSpec& model, const Config& config, const Mesh& mesh) {
  const int ranks = mesh.size(MeshAxis::context);
  if (ranks == 1) return;
  const std::string at = fmt::format("tranche.mesh \"{}\": ", config.mesh);
  if (!model.sequence_parts) {
    throw ConfigurationError(
        fmt::format("{}{} computes no parts of sequences (ModelSpec::sequence_parts), so all {} ranks of "
                    "context would compute the same; leave context out",
                    at, model.name.empty() ? "the model" : model.name, ranks));
  }
  if (model.tokens_per_sample < 2 * ranks) {
    throw ConfigurationError(
        fmt::format("{}samples of {} tokens cannot be cut into the {} parts that {} ranks of context share; "
                    "use sequences of at least {} tokens, or a smaller context",
                    at, model.tokens_per_sample, 2 * ranks, ranks, 2 * ranks));
  }
  if (config.context_exchange == ContextExchange::ulysses) check_heads(model, config, mesh);
}

}  // namespace tranche::detail
