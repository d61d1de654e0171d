// tranche checkpoint diff.

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <ostream>

#include "checkpoint/compare.h"
#include "tools/checkpoint/checkpoint_command.h"

namespace tranche::tools {

using checkpoint::Reader;
using checkpoint::TensorDifference;
using nlohmann::ordered_json;

namespace {

const char* word_of(TensorDifference::What what) {
  switch (what) {
    case TensorDifference::What::shape:
      return "shape";
    case TensorDifference::What::only_in_first:
      return "only_in_first";
    case TensorDifference::What::only_in_second:
      return "only_in_second";
    case TensorDifference::What::values:
      break;
  }
  return "values";
}

/// JSON has no infinities and NaN, so they become null.
ordered_json figure(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json();
}

ordered_json json_of(const TensorDifference& difference) {
  ordered_json json = {
      {"tensor", difference.tensor}, {"kind", difference.kind}, {"what", word_of(difference.what)}};
  if (difference.what == TensorDifference::What::values) {
    json.update(ordered_json{{"differing", difference.differing},
                             {"largest", figure(difference.largest)},
                             {"first", difference.first},
                             {"first_in_first", figure(difference.first_in_first)},
                             {"first_in_second", figure(difference.first_in_second)}});
  }
  return json;
}

std::string title(const Reader& reader) {
  return fmt::format("{} (step {}, {} rank{}, stage {})", reader.folder(), reader.manifest().run.step,
                     reader.layout().world, reader.layout().world == 1 ? "" : "s", reader.manifest().stage);
}

}  // namespace

int checkpoint_diff(const CheckpointOptions& options, const Output& output) {
  const checkpoint::LocalStorage local;
  Reader first(local, chosen_checkpoint(detail::posix_file_system(), options.path, output));
  Reader second(local, chosen_checkpoint(detail::posix_file_system(), options.second, output));
  const checkpoint::Comparison comparison = checkpoint::compare(first, second);
  if (options.json) {
    ordered_json differences = ordered_json::array();
    for (const TensorDifference& difference : comparison.differences)
      differences.push_back(json_of(difference));
    const ordered_json json = {{"first", first.folder()},
                               {"second", second.folder()},
                               {"equal", comparison.equal()},
                               {"compared", comparison.compared},
                               {"differences", differences}};
    output.out << json.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
  } else {
    output.out << "first:  " << title(first) << "\nsecond: " << title(second) << "\n";
    for (const TensorDifference& difference : comparison.differences) {
      output.out << checkpoint::describe(difference) << "\n";
    }
    output.out << fmt::format(
        "{} compared, of every tensor its weight and optimizer states: {}\n", comparison.compared,
        comparison.equal() ? "equal to the bit" : fmt::format("{} differ", comparison.differences.size()));
  }
  return comparison.equal() ? 0 : 1;
}

}  // namespace tranche::tools
