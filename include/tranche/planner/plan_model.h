#pragma once
/// The models that can be planned: a language model, whose steps are executed, or a list of units of which
/// only the sizes are known.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tranche/engine/model_spec.h"
#include "tranche/models/model_registry.h"

namespace tranche {
class Engine;
}

namespace tranche::planner {

/// Limit of the units in a list; the cost of a plan grows with their square.
inline constexpr std::int64_t most_listed_units = 4096;
/// Limit of the uses of all units in one pass; a plan visits each use.
inline constexpr std::int64_t most_listed_uses = 65'536;

struct PlanModel {
  std::string name;                                       ///< the argument of --model
  std::shared_ptr<const models::LanguageModel> language;  ///< null for a list
  ModelSpec list;                                         ///< used for a list

  /// False for a list: nothing is known of its activations.
  bool covers_activations() const noexcept { return language != nullptr; }
  /// The model from which the Engine is made. `sequence` matters only to a language model.
  ModelSpec spec(std::int64_t sequence) const;
  /// `sequence`; if it is 0, the longest sequence that the language model takes.
  std::int64_t sequence_or_longest(std::int64_t sequence) const;
};

/// Loads a preset by its name, a config.json that `models` can read, or a list of units (a JSON object with
/// the key "units", described in docs/reference/plan-files.md). Throws ConfigurationError that names the file
/// and the key.
PlanModel load_plan_model(const std::string& preset_or_path,
                          const models::ModelRegistry& models = models::ModelRegistry::with_builtin());
/// Parses a list of units from JSON text; errors name `origin`.
PlanModel parse_unit_list(std::string_view json_text, const std::string& origin);

/// One micro-batch of a list of units, in the order of models that compute unit by unit. Forward runs all
/// units in order. Then come further uses of units that have them (a tied head), whose gradients are handed
/// over under the same gather. Backward runs all units in reverse and gathers each again.
void pass_over_units(Engine& engine);
/// Only forward, between Engine::begin_evaluation and end_evaluation.
void evaluate_units(Engine& engine);

}  // namespace tranche::planner
