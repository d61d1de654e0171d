#pragma once
/// Models as a plan takes them: a language model, whose steps are run, or a list of units of which only sizes
/// are known.

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

/// Most units of a list: what a plan of them takes grows with their square.
inline constexpr std::int64_t most_listed_units = 4096;
/// Most uses of all of them in one pass: each is gone through.
inline constexpr std::int64_t most_listed_uses = 65'536;

struct PlanModel {
  std::string name;                                       ///< as given to --model
  std::shared_ptr<const models::LanguageModel> language;  ///< empty: a list
  ModelSpec list;                                         ///< of a list

  /// Nothing is known of the activations of a list.
  bool covers_activations() const noexcept { return language != nullptr; }
  /// The model that the Engine is made with; `sequence` matters to a language model.
  ModelSpec spec(std::int64_t sequence) const;
  /// `sequence`, or where it is 0 the longest that a language model takes.
  std::int64_t sequence_or_longest(std::int64_t sequence) const;
};

/// A preset's name, or the path of a config.json that `models` reads, or of a list of units
/// (docs/reference/plan-files.md has its keys; a JSON object with "units" is one). Throws ConfigurationError
/// naming file and key.
PlanModel load_plan_model(const std::string& preset_or_path,
                          const models::ModelRegistry& models = models::ModelRegistry::with_builtin());
/// A list of units from JSON text; `origin` is named in errors.
PlanModel parse_unit_list(std::string_view json_text, const std::string& origin);

/// One micro-batch of a list of units, as models that compute unit by unit ask for them: all forward, in
/// order; then further uses of the units that have them (a tied head), their gradients handed over under the
/// same gather; then all backward, each gathered again.
void pass_over_units(Engine& engine);
/// The forward half alone, between Engine::begin_evaluation and end_evaluation.
void evaluate_units(Engine& engine);

}  // namespace tranche::planner
