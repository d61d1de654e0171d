#include "tranche/planner/plan_model.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/json.h"
#include "core/json_node.h"
#include "core/text_file.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/models/language_model.h"
#include "tranche/models/step_tensors.h"

namespace tranche::planner {

using detail::JsonNode;

namespace {

/// Limits a tensor's elements, so that adding one tensor to a valid sum does not overflow.
void require_planned(std::int64_t elements, const JsonNode& where) {
  if (elements <= models::most_parameters) return;
  where.fail(fmt::format("has too many parameters: models of more than {} are not planned",
                         models::most_parameters));
}

Shape shape_of(const JsonNode& node) {
  try {
    return Shape(node.integers(1));
  } catch (const InvalidArgument& error) {
    node.fail(fmt::format("is not a shape: {}", error.message()));
  }
}

/// Reads a list of units; every error names the file and the key.
class ListReader {
 public:
  ModelSpec read(const JsonNode& root) {
    root.allow({"units", "tokens_per_sample", "flops_per_token"});
    spec_.tokens_per_sample = root["tokens_per_sample"].integer_or(1, 1, INT32_MAX);
    spec_.flops_per_token = root["flops_per_token"].number_or(0, 0);
    for (const JsonNode& unit : root["units"].items(1)) add_unit(unit);
    return std::move(spec_);
  }

 private:
  void add_unit(const JsonNode& node) {
    node.allow({"name", "tensors", "uses_per_pass", "repeat"});
    const std::string name = node["name"].name();
    const JsonNode repeat = node["repeat"];
    UnitSpec base;
    base.uses_per_micro_batch = node["uses_per_pass"].integer_or<int>(1, 1, 1000);
    std::int64_t elements = 0;
    for (const auto& [tensor, extents] : node["tensors"].members()) {
      base.tensors.push_back({tensor, shape_of(extents), {}});
      elements += base.tensors.back().shape.elements();
      require_planned(elements, node);
    }
    if (base.tensors.empty())
      node["tensors"].fail("has no tensor; at least one's name and extents are needed");
    for (std::int64_t i = 0; i < repeat.integer_or(1, 1, most_listed_units); ++i) {
      if (static_cast<std::int64_t>(spec_.units().size()) >= most_listed_units) {
        node.fail(fmt::format("is too much: a list of more than {} units is not planned; join some",
                              most_listed_units));
      }
      elements_ += elements;
      require_planned(elements_, node);
      uses_ += base.uses_per_micro_batch;
      if (uses_ > most_listed_uses) {
        node.fail(fmt::format(
            "is too much: units that are used more than {} times a micro-batch in all are not planned",
            most_listed_uses));
      }
      UnitSpec each = base;
      each.name = name;
      if (repeat) each.name += fmt::format(".{}", i);
      for (TensorSpec& tensor : each.tensors) tensor.name = each.name + "." + tensor.name;
      try {
        spec_.add_unit(std::move(each));
      } catch (const InvalidArgument& error) {
        node["name"].fail(fmt::format("is refused: {}", error.message()));
      }
    }
  }

  ModelSpec spec_;
  std::int64_t elements_ = 0, uses_ = 0;  ///< sums over the units that have been read
};

}  // namespace

ModelSpec PlanModel::spec(std::int64_t sequence) const {
  return language ? language->spec(sequence) : list;
}

std::int64_t PlanModel::sequence_or_longest(std::int64_t sequence) const {
  return sequence > 0 || !language ? sequence : language->shape().positions;
}

PlanModel parse_unit_list(std::string_view json_text, const std::string& origin) {
  PlanModel model;
  model.name = origin;
  model.list = ListReader().read(JsonNode::read<ConfigurationError>(json_text, origin));
  return model;
}

PlanModel load_plan_model(const std::string& preset_or_path, const models::ModelRegistry& models) {
  std::error_code ignored;
  if (std::filesystem::is_regular_file(preset_or_path, ignored)) {
    const std::string text = detail::read_text_file(preset_or_path, "the model's file");
    if (detail::parse_json(text).contains("units")) return parse_unit_list(text, preset_or_path);
  }
  PlanModel model;
  model.name = preset_or_path;
  model.language = models.resolve(preset_or_path);
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
    for (int use = 1; use < units[static_cast<std::size_t>(u)].uses_per_micro_batch; ++use) {
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
      const int uses = round == 0 ? 1 : units[static_cast<std::size_t>(u)].uses_per_micro_batch - 1;
      for (int use = 0; use < uses; ++use) engine.gather({u}).release();
    }
  }
  engine.end_micro_batch(totals[0], totals[1]);
}

}  // namespace tranche::planner
