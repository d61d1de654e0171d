#pragma once
/// Short trainings that combine any two capabilities; docs/combinations.md is generated from their table.

#include <functional>
#include <string>
#include <vector>

#include "tests/core/covering.h"
#include "training_fixture.h"
#include "tranche/device/ledger.h"

namespace tranche::models {

enum class Architecture : std::uint8_t { gpt, llama, qwen3 };
enum class Rule : std::uint8_t { configured, own };
enum class Gradients : std::uint8_t { as_they_are, in_hook, before_step, not_finite };
enum class Rates : std::uint8_t { configured, own_schedule, set };
enum class Continued : std::uint8_t {
  not_at_all,
  at_another_stage,
  by_other_ranks,
  in_another_dtype,
  from_weights,
  partially
};

/// One training of a small model.
struct Combination {
  Architecture architecture = Architecture::gpt;
  bool documents = false;  ///< several documents in a row
  bool lengths = false;    ///< micro-batches have changing lengths
  int ranks = 2;
  int pipeline = 1;  ///< stages, with equal numbers of ranks
  int tensor = 1;    ///< size of the axis `tensor`: ranks that share each layer
  int context = 1;   ///< ranks that share the tokens of each sequence
  /// Ranks that share the samples of a data rank.
  int ranks_of_sample() const { return pipeline * tensor * context; }
  Config config;
  float dropout = 0;
  bool whole_batches = false;  ///< every token of a batch is learned; otherwise some are ignored
  bool wide = false;           ///< matrices of more than 4096 elements, which block8 needs
  Rule rule = Rule::configured;
  Gradients gradients = Gradients::as_they_are;
  Rates rates = Rates::configured;
  Continued continued = Continued::not_at_all;
  bool own_weights = false;     ///< a function gives the embedding's initial values
  bool change_batch = false;    ///< after the second step
  bool evaluate = false;        ///< after the second and all later steps
  bool generate = false;        ///< after the second and all later steps
  bool save_meanwhile = false;  ///< after the second step, in the background, with an array of the program's
  bool stop = false;            ///< the last rank requests it after the second step
  bool trace = false;
};

/// A setting and its values. `changes_bits`: a run is compared with one that has the same value; otherwise
/// with one that has the first value.
struct CombinationAxis {
  struct Value {
    std::string capability;  ///< its key in tests/combinations.json; empty: the table has no row for it
    std::function<void(Combination&)> apply;
  };
  std::string name;
  bool changes_bits = false;
  std::vector<Value> values;
};

/// The axes, in the order in which values are applied.
std::vector<CombinationAxis> combination_axes();
/// False for values that are refused together, and if one of the two has no effect.
bool can_meet(const CombinationAxis& a, int value, const CombinationAxis& b, int other);
Combination combination_of(const std::vector<CombinationAxis>& axes, const test::CoveringRow& row);
/// The same arithmetic at stage 0, with the simplest value of everything else.
Combination plain_combination_of(const std::vector<CombinationAxis>& axes, const test::CoveringRow& row);
int ranks_of_a_copy(const Combination& c);
/// The ranks that see different samples.
int data_ranks_of(const Combination& c);
/// The values of a row that are not the first of their axis.
std::string text_of(const std::vector<CombinationAxis>& axes, const test::CoveringRow& row);

/// The results of a training on its rank 0.
struct CombinationOutcome {
  std::vector<StepResult> steps;
  std::vector<EvaluationResult> evaluations;
  std::vector<std::vector<float>> logits;
  std::vector<std::vector<std::int32_t>> texts;
  kernels::Digest second;                     ///< all state after the second step; only for plain trainings
  kernels::Digest last;                       ///< all state at the end
  kernels::Digest saved;                      ///< state in the checkpoint that was written meanwhile
  std::vector<std::int64_t> array;            ///< the program's own array in it
  std::array<TierAccount, tier_count> tiers;  ///< accounts of the first engine
  std::string traffic;
};

struct CombinationPlace {
  DeviceKind device = DeviceKind::cpu;
  std::string folder;  ///< for swap files and checkpoints
  /// Runs body(rank, factory) on each of `ranks` ranks; thread ranks unless set.
  std::function<void(int ranks, const std::function<void(int, const CommunicatorFactory&)>&)> on_ranks = {};
};

/// `plain`: digests the state after the second step.
CombinationOutcome train_combination(const Combination& combination, const CombinationPlace& place,
                                     bool plain = false);
/// The training's first engine on the meta device, as rank 0.
CombinationOutcome plan_combination(const Combination& combination);

}  // namespace tranche::models
