#include "engine/chain_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/kernels/matmul.h"

namespace tranche::detail {

namespace {

[[noreturn]] void refuse_chain(const std::string& reason) {
  throw ConfigurationError("tranche.tensor_sums: chain: " + reason);
}

/// Throws if a rank's part of the tensor does not begin at a multiple of `step` elements.
void check_chained_cut(const TensorSpec& tensor, const TensorCut& cut, int ranks, std::int64_t step,
                       std::string_view path) {
  const std::int64_t grains = grains_of(tensor.shape, cut);
  // The parts of layers must also end at a multiple, because only then do their transposed products use this
  // path.
  const int ends = tensor.matrices > 0 ? ranks : ranks - 1;
  for (int rank = 1; rank <= ends; ++rank) {
    const std::int64_t begin = grains * rank / ranks * cut.grain;
    if (begin % step == 0) continue;
    refuse_chain(
        fmt::format("products run by \"{}\" here, which adds {} elements at once, but tensor={} cuts {} at "
                    "element {}; write rank_order, or another size of tensor",
                    path, step, ranks, tensor.name, begin));
  }
}

}  // namespace

void check_chains(const ModelSpec& model, const Config& config, std::span<const TensorCut> cuts, int ranks,
                  DeviceKind device) {
  if (config.tensor_sums != TensorSums::chain || ranks == 1) return;
  if (!model.chain_sums) {
    refuse_chain(fmt::format("{} does not compute in chains (ModelSpec::chain_sums); write rank_order",
                             model.name.empty() ? "the model" : model.name));
  }
  const DataType dtype = config.precision.compute;
  const kernels::SumOrder order = kernels::matmul_sum_order(device, dtype);
  const std::string_view path = kernels::matmul_path(device, dtype);
  if (!order.ascending) {
    refuse_chain(
        fmt::format("products of {} run by \"{}\" here, which does not add up in ascending order, so "
                    "that no chain has the bits of one rank; write rank_order",
                    name_of(dtype), path));
  }
  const std::vector<std::string>& names = model.tensor_dimensions;
  const auto computes_parts = [&](const std::string& name) {
    return name == "vocabulary" && config.leaves_whole(name) &&
           std::find(names.begin(), names.end(), name) != names.end();
  };
  std::size_t number = 0;
  for (const UnitSpec& unit : model.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      TensorCut cut = cuts[number++];
      // A table that the layout keeps whole is still computed in the same parts.
      for (std::size_t d = 0; d < tensor.dimensions.size(); ++d) {
        const Dimension& one = tensor.dimensions[d];
        if (computes_parts(one.name)) cut = {static_cast<int>(d), one.blocks, one.grain};
      }
      if (!cut.whole()) check_chained_cut(tensor, cut, ranks, order.step, path);
    }
  }
}

}  // namespace tranche::detail
