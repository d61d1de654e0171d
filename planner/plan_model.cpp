#include "tranche/planner/plan_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/json.h"
#include "core/nearest.h"
#include "core/text_file.h"
#include "engine/config_reader.h"
#include "models/step_tensors.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/models/gpt.h"

namespace tranche::planner {

namespace {

using Json = detail::Json;

/// Reads a list; every error names the file and the key.
class ListReader {
 public:
  explicit ListReader(const std::string& origin) : origin_(origin) {}

  ModelSpec read(const Json& root) {
    require_object(root, "the file");
    require_known(root, "", {"units", "tokens_per_sample", "flops_per_token"});
    ModelSpec spec;
    spec.tokens_per_sample = integer(root, "", "tokens_per_sample", 1, INT32_MAX);
    spec.flops_per_token = number(root, "flops_per_token");
    const auto units = root.find("units");
    if (units == root.end() || !units->is_array() || units->empty()) {
      fail("units", "a list of at least one unit is wanted");
    }
    for (std::size_t i = 0; i < units->size(); ++i) {
      add_unit(spec, (*units)[i], fmt::format("units[{}]", i));
    }
    return spec;
  }

 private:
  [[noreturn]] void fail(const std::string& key, const std::string& why) const {
    throw ConfigurationError(fmt::format("{}: {}: {}", origin_, key, why));
  }
  static std::string path(const std::string& block, std::string_view key) {
    return block.empty() ? std::string(key) : fmt::format("{}.{}", block, key);
  }

  /// A sum of what is within this and one tensor does not overflow.
  void require_planned(std::int64_t elements, const std::string& where) const {
    if (elements <= models::most_parameters) return;
    fail(where, fmt::format("models of more than {} parameters are not planned", models::most_parameters));
  }

  void require_object(const Json& value, const std::string& where) const {
    if (!value.is_object()) fail(where, fmt::format("{} is no JSON object", brief_json(value)));
  }

  void require_known(const Json& object, const std::string& block,
                     const std::vector<std::string>& known) const {
    for (const auto& [key, value] : object.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      const std::string near = nearest(key, known);
      fail(path(block, key),
           fmt::format("unknown key{}; there are {}", near.empty() ? "" : " (did you mean \"" + near + "\"?)",
                       fmt::join(known, ", ")));
    }
  }

  std::int64_t integer(const Json& object, const std::string& block, const char* key, std::int64_t otherwise,
                       std::int64_t most) const {
    const auto found = object.find(key);
    if (found == object.end()) return otherwise;
    if (!found->is_number_integer() || found->get<double>() < 1 ||
        found->get<double>() > static_cast<double>(most)) {
      fail(path(block, key), fmt::format("{} is no integer from 1 to {}", brief_json(*found), most));
    }
    return found->get<std::int64_t>();
  }

  double number(const Json& object, const char* key) const {
    const auto found = object.find(key);
    if (found == object.end()) return 0;
    if (!found->is_number() || found->get<double>() < 0) {
      fail(key, fmt::format("{} is no number of at least 0", brief_json(*found)));
    }
    return found->get<double>();
  }

  Shape shape(const Json& value, const std::string& where) const {
    if (!value.is_array() || value.size() > Shape::max_rank) {
      fail(where, fmt::format("{} is no list of at most {} extents", brief_json(value), Shape::max_rank));
    }
    std::vector<std::int64_t> extents;
    for (const Json& extent : value) {
      if (!extent.is_number_integer() || extent.get<double>() < 1 || extent.get<double>() > 4e18) {
        fail(where, fmt::format("extent {} is no positive integer", brief_json(extent)));
      }
      extents.push_back(extent.get<std::int64_t>());
    }
    try {
      return Shape(extents);
    } catch (const InvalidArgument& error) {
      fail(where, error.message());
    }
  }

  void add_unit(ModelSpec& spec, const Json& unit, const std::string& where) {
    require_object(unit, where);
    require_known(unit, where, {"name", "tensors", "uses_per_pass", "repeat"});
    const auto name = unit.find("name");
    if (name == unit.end() || !name->is_string() || name->get<std::string>().empty()) {
      fail(path(where, "name"), "a name is wanted, as text");
    }
    const auto tensors = unit.find("tensors");
    if (tensors == unit.end() || !tensors->is_object() || tensors->empty()) {
      fail(path(where, "tensors"), "an object of at least one tensor's name and extents is wanted");
    }
    const std::int64_t repeat = integer(unit, where, "repeat", 1, most_listed_units);
    UnitSpec base;
    base.uses_per_pass = static_cast<int>(integer(unit, where, "uses_per_pass", 1, 1000));
    std::int64_t elements = 0;
    for (const auto& [tensor, extents] : tensors->items()) {
      base.tensors.push_back({tensor, shape(extents, path(where, "tensors") + "." + tensor), {}});
      elements += base.tensors.back().shape.elements();
      require_planned(elements, where);
    }
    for (std::int64_t i = 0; i < repeat; ++i) {
      if (static_cast<std::int64_t>(spec.units().size()) >= most_listed_units) {
        fail(where, fmt::format("a list of more than {} units is not planned; join some", most_listed_units));
      }
      elements_ += elements;
      require_planned(elements_, where);
      uses_ += base.uses_per_pass;
      if (uses_ > most_listed_uses) {
        fail(where, fmt::format("units that are used more than {} times a pass in all are not planned",
                                most_listed_uses));
      }
      UnitSpec each = base;
      each.name = name->get<std::string>();
      if (unit.contains("repeat")) each.name += fmt::format(".{}", i);
      for (TensorSpec& tensor : each.tensors) tensor.name = each.name + "." + tensor.name;
      try {
        spec.add_unit(std::move(each));
      } catch (const InvalidArgument& error) {
        fail(path(where, "name"), error.message());
      }
    }
  }

  const std::string& origin_;
  std::int64_t elements_ = 0, uses_ = 0;  ///< of all units so far
};

}  // namespace

ModelSpec PlanModel::spec(std::int64_t sequence) const {
  return gpt ? models::Gpt::spec(*gpt, sequence) : list;
}

PlanModel parse_unit_list(std::string_view json_text, const std::string& origin) {
  PlanModel model;
  model.name = origin;
  model.list = ListReader(origin).read(detail::read_json(json_text, origin));
  return model;
}

PlanModel load_plan_model(const std::string& preset_or_path) {
  std::error_code ignored;
  if (std::filesystem::is_regular_file(preset_or_path, ignored)) {
    const std::string text = read_text_file(preset_or_path, "the model's file");
    if (parse_json(text).contains("units")) return parse_unit_list(text, preset_or_path);
  }
  PlanModel model;
  model.name = preset_or_path;
  model.gpt = models::GptConfig::resolve(preset_or_path);
  return model;
}

void pass_over_units(Engine& engine) {
  const std::vector<UnitSpec>& units = engine.model().units();
  const auto count = static_cast<int>(units.size());
  engine.begin_micro_batch();
  const models::StepTensors totals(engine, Category::other, "loss and tokens",
                                   {{DataType::float64, {}}, {DataType::int64, {}}});
  for (int u = 0; u < count; ++u) engine.gather({u}).release();
  for (int u = 0; u < count; ++u) {
    for (int use = 1; use < units[static_cast<std::size_t>(u)].uses_per_pass; ++use) {
      const GatheredUnit weights = engine.gather({u});
      engine.gradients({u}).reduce();
    }
  }
  for (int u = count - 1; u >= 0; --u) {
    const GatheredUnit weights = engine.gather({u});
    engine.gradients({u}).reduce();
  }
  engine.end_micro_batch(totals[0], totals[1]);
}

void evaluate_units(Engine& engine) {
  const std::vector<UnitSpec>& units = engine.model().units();
  engine.begin_micro_batch();
  const models::StepTensors totals(engine, Category::other, "loss and tokens",
                                   {{DataType::float64, {}}, {DataType::int64, {}}});
  for (int round = 0; round < 2; ++round) {
    for (int u = 0; u < static_cast<int>(units.size()); ++u) {
      const int uses = round == 0 ? 1 : units[static_cast<std::size_t>(u)].uses_per_pass - 1;
      for (int use = 0; use < uses; ++use) engine.gather({u}).release();
    }
  }
  engine.end_micro_batch(totals[0], totals[1]);
}

}  // namespace tranche::planner
