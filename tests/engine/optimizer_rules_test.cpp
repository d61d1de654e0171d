// Every optimizer of the registry in an engine: the same bits for every tier and partition, plans that equal
// the ledger, and runs that resume with other ranks and another stage.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "on_ranks.h"
#include "same_bits.h"
#include "saving_fixture.h"
#include "tests/core/rounds.h"
#include "tranche/optim/rules.h"

namespace tranche::test {
namespace {

/// One case for each set of states that a type has.
struct RuleCase {
  std::string type;
  RuleParameters parameters;
  bool moments;  ///< may be stored in bf16
};
const std::vector<RuleCase>& rule_cases() {
  static const std::vector<RuleCase> all = {
      {"AdamW", {{"amsgrad", 1}, {"weight_decay", 0.1}}, true},
      {"Adam", {{"adam_w_mode", 0}, {"weight_decay", 0.1}}, true},
      {"Adagrad", {{"initial_accumulator_value", 0.1}}, false},
      {"LARS", {{"trust_coefficient", 0.1}, {"weight_decay", 0.1}}, true},
      {"Lamb", {{"weight_decay", 0.1}}, true},
      {"Lion", {{"weight_decay", 0.1}}, true},
      {"Muon", {{"weight_decay", 0.1}, {"adam_lr", 0.01}}, true},
      {"RMSprop", {}, true},
      {"RMSprop", {{"centered", 1}, {"momentum", 0.5}, {"eps", 1e-3}}, true},
      {"SGD", {{"momentum", 0.9}, {"nesterov", 1}}, true}};
  return all;
}

OddRun run_of(const RuleCase& rule, int ranks, bool reduced) {
  OddRun run;
  run.ranks = ranks;
  run.dtype = DataType::bfloat16;
  run.policy = ReductionPolicy::micro_batch;
  run.accumulation = 2;
  run.steps = 3;
  run.optimizer = rule.type;
  run.parameters = rule.parameters;
  run.moments = reduced ? DataType::bfloat16 : DataType::float32;
  return run;
}

bool looks_first(const RuleCase& rule) {
  return find_rule(rule.type)->rule->trust;
}

TEST(OptimizerRules, HaveACaseEach) {
  for (const RuleType& type : rule_types()) {
    const auto& cases = rule_cases();
    EXPECT_TRUE(std::any_of(cases.begin(), cases.end(), [&](const RuleCase& c) {
      return c.type == type.name;
    })) << type.name;
  }
}

TEST(OptimizerRules, GiveTheSameBitsOverStagesTiersAndBuckets) {
  int point = 0;
  for (const RuleCase& rule : rule_cases()) {
    for (const int ranks : {1, 2, 3}) {
      for (const bool reduced : {false, true}) {
        if (reduced && !rule.moments) continue;
        if (!swept(point++, 7)) continue;
        (void)expect_the_same_everywhere(run_of(rule, ranks, reduced));
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(OptimizerRules, OfWholeTensorsHaveTheBitsOfOneShardedModelOnAMesh) {
  for (const RuleCase& rule : rule_cases()) {
    if (!looks_first(rule) && !find_rule(rule.type)->rule->whole_matrices) continue;
    expect_the_same_on_meshes(run_of(rule, 4, false));
  }
}

// Gradients are fp16, scaled, clipped, and of micro-batches with different numbers of tokens. The ratio must
// be that of the resulting update; because of epsilon it depends on the scale.
TEST(OptimizerRules, LambsTrustRatiosAreThoseOfTheTrueGradient) {
  for (const int ranks : {1, 3}) {
    OddRun run = run_of({"Lamb", {{"weight_decay", 0.05}, {"eps", 0.1}}, true}, ranks, false);
    run.dtype = DataType::float16;
    run.clipping = 0.5;
    run.stage = ranks == 1 ? 0 : 2;
    on_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          for (std::int64_t m = 0; m < 2; ++m) {
            odd_micro_batch(engine, 10 * m + 3 * runtime.rank(), 1 + (m + runtime.rank()) % 3);
          }
          struct Before {
            std::vector<float> weight, gradient;
            double decay;
          };
          std::map<std::string, Before> before;
          for (const UnitSpec& unit : engine.model().units()) {
            for (const TensorSpec& tensor : unit.tensors) {
              if (engine.frozen(tensor.name)) continue;
              before[tensor.name] = {engine.read_weight(tensor.name), engine.read_gradient(tensor.name),
                                     tensor.shape.rank() > 1 ? 0.05 : 0};  // vectors have no weight decay
            }
          }
          const StepResult step = engine.step();
          ASSERT_TRUE(step.applied);
          ASSERT_LT(step.clip_coefficient, 0.9);
          ASSERT_EQ(step.loss_scale, 1024);
          for (const auto& [name, values] : before) {
            const auto& [weight, gradient, decay] = values;
            const std::vector<float> after = engine.read_weight(name);
            double weights = 0, updates = 0, change = 0;
            for (std::size_t i = 0; i < weight.size(); ++i) {
              const double g = gradient[i] * step.clip_coefficient;
              const double u = g / (std::abs(g) + 0.1) + decay * weight[i];
              weights += double{weight[i]} * weight[i];
              updates += u * u;
              change += (double{weight[i]} - after[i]) * u;
            }
            const double wanted = weights == 0 ? 1 : std::sqrt(weights / updates);
            EXPECT_NEAR(change / updates, wanted, 1e-6 * wanted) << name << " on " << ranks << " ranks";
          }
        },
        [](Config& config, RuntimeOptions&) {
          config.optimizer.learning_rate = 1;
          config.loss_scaling = true;
          config.loss_scaler.initial_scale = 1024;
        });
  }
}

TEST(OptimizerRules, ArePlannedToTheByte) {
  for (const RuleCase& rule : rule_cases()) {
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
      OddRun run = run_of(rule, 2, rule.moments);
      run.stage = 2;
      run.accumulation = 1;
      run.offload.optimizer = tier;
      run.offload.tile_elements = 4096;
      run.offload.nvme_path = std::filesystem::temp_directory_path().string();
      std::vector<TierAccount> measured, planned;
      OffloadTraffic moved, foreseen;
      const auto train = [&](Engine& engine, Runtime& runtime) {
        for (int step = 0; step < 3; ++step) {
          whole_step(engine, runtime, step);
          const StepResult result = engine.step();
          if (runtime.rank() != 0) continue;
          (engine.device().kind() == DeviceKind::meta ? foreseen : moved) = result.offload_traffic;
        }
        if (runtime.rank() != 0) return;
        auto& into = engine.device().kind() == DeviceKind::meta ? planned : measured;
        for (const Tier of : {Tier::device, Tier::host}) into.push_back(runtime.ledger().account(of));
      };
      on_ranks(run, train);
      const Config config = odd_config(run);
      RuntimeOptions options = RuntimeOptions::from(config);
      options.device = DeviceKind::meta;
      Runtime runtime(options,
                      [](const CommunicatorOptions& of) { return make_meta_communicator(0, 2, 2, of); });
      Engine engine(runtime, odd_model(), config);
      train(engine, runtime);
      EXPECT_EQ(moved.nvme_read, foreseen.nvme_read) << rule.type;
      EXPECT_EQ(moved.nvme_written, foreseen.nvme_written) << rule.type;
      EXPECT_EQ(moved.nvme_read, moved.nvme_written) << rule.type << ": weights live on the device";
      EXPECT_EQ(moved.nvme_read > 0, tier == OffloadTier::nvme) << rule.type;
      ASSERT_EQ(measured.size(), planned.size());
      for (std::size_t t = 0; t < planned.size(); ++t) {
        EXPECT_EQ(measured[t].peak, planned[t].peak) << rule.type;
        EXPECT_EQ(measured[t].persistent.bytes, planned[t].persistent.bytes) << rule.type;
      }
    }
  }
}

class OptimizerRulesResume : public Saving {
 protected:
  /// Expects the following: `from` ranks save after two steps; others, in another stage, load equal weights
  /// and state, and continue.
  void expect_resumed(const RuleCase& rule, int from, const std::vector<int>& to) const {
    std::filesystem::remove_all(path());
    OddRun run = run_of(rule, from, rule.moments);
    run.accumulation = 1;
    run.stage = 1;
    kernels::Digest saved, loaded;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < 2; ++step) {
        whole_step(engine, runtime, step);
        engine.step();
      }
      engine.save(path(), {.wait = true});
      const kernels::Digest digest = engine.state_digest();
      if (runtime.rank() == 0) saved = digest;
    });
    run.stage = 3;
    for (const int ranks : to) {
      run.ranks = ranks;
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        engine.load(path());
        const kernels::Digest digest = engine.state_digest();
        if (runtime.rank() == 0) loaded = digest;
        whole_step(engine, runtime, 2);
        EXPECT_TRUE(engine.step().applied);
      });
      EXPECT_EQ(saved, loaded) << rule.type << " from " << from << " ranks to " << ranks;
    }
  }
};
using OptimizerRulesResumeSlow = OptimizerRulesResume;

TEST_F(OptimizerRulesResume, AtOtherRanksAndAnotherStage) {
  for (const RuleCase& rule : rule_cases()) expect_resumed(rule, 3, {2});
}

TEST_F(OptimizerRulesResumeSlow, FromEveryNumberOfRanksToEvery) {
  const std::vector<int> numbers = {1, 2, 3, 4, 6, 8};
  for (const RuleCase& rule : rule_cases()) {
    for (const int from : numbers) expect_resumed(rule, from, numbers);
  }
}

}  // namespace
}  // namespace tranche::test
