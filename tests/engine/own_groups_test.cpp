// Parameter groups with values of their own: a tensor in such a group has the bits that it would have in an
// engine whose optimizer has those values for all tensors. The odd model's gradients of one tensor do not
// depend on the others.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "device/cuda_probe.h"
#include "on_ranks.h"
#include "saving_fixture.h"
#include "tests/core/rounds.h"

namespace tranche::test {
namespace {

/// A part of a unit, most of another, and a tensor that is initially zero; the unit `tiny` has none.
const std::vector<std::string> own_tensors = {"tied.b", "prime.c", "mixed.g"};

bool is_own(const std::string& tensor) {
  return std::find(own_tensors.begin(), own_tensors.end(), tensor) != own_tensors.end();
}

void with_globals(Config& config) {
  config.optimizer.parameters["weight_decay"] = 0.01;
  config.schedule.type = "WarmupLR";
  config.schedule.parameters_json =
      R"({"warmup_num_steps": 3, "warmup_min_lr": 0.01, "warmup_max_lr": 0.05})";
}

void with_own_groups(Config& config) {
  with_globals(config);
  for (const std::string& tensor : own_tensors) {
    ParameterGroupRule rule;
    rule.pattern = tensor;
    rule.learning_rate = 0.02;
    rule.weight_decay = 0.3;
    if (config.optimizer.type != "SGD") {
      rule.betas = {0.7, 0.95};
      rule.epsilon = 1e-3;
    }
    config.group_rules.push_back(rule);
  }
}

void with_own_for_all(Config& config) {
  config.optimizer.learning_rate = 0.02;
  config.optimizer.parameters["weight_decay"] = 0.3;
  if (config.optimizer.type != "SGD") {
    config.optimizer.parameters["betas"] = std::array{0.7, 0.95};
    config.optimizer.parameters["eps"] = 1e-3;
  }
  config.group_rules.push_back({"*", std::nullopt, true});
}

class OwnGroups : public Saving {
 protected:
  using Values = std::map<std::string, std::vector<float>>;
  using Adjust = void (*)(Config&);

  /// Weights and optimizer state of every trainable tensor after a few steps, one of which is skipped.
  static Values trained(const OddRun& run, Adjust adjust) {
    Values values;
    on_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          for (int step = 0; step < run.steps; ++step) {
            whole_step(engine, runtime, step, step == 2 ? "mixed.f" : "");
            EXPECT_EQ(engine.step().applied, step != 2);
          }
          for (const UnitSpec& unit : engine.model().units()) {
            for (const TensorSpec& tensor : unit.tensors) {
              if (engine.frozen(tensor.name)) continue;
              std::vector<float> all = engine.read_weight(tensor.name);
              for (const OptimizerStateTensor& state : make_optimizer(engine.config())->state({})) {
                const std::vector<float> more = engine.read_optimizer_state(tensor.name, state.name);
                all.insert(all.end(), more.begin(), more.end());
              }
              if (runtime.rank() == 0) values[tensor.name] = all;
            }
          }
        },
        [&](Config& config, RuntimeOptions& options) {
          adjust(config);
          options.device = run.device;
        });
    return values;
  }

  void expect_bits(OddRun run) {
    run.clipping = 0;  // the norm of all gradients would couple the tensors
    run.steps = 5;
    run.offload.nvme_path = std::filesystem::temp_directory_path().string();
    const Values mixed = trained(run, with_own_groups);
    const Values own = trained(run, with_own_for_all), global = trained(run, with_globals);
    ASSERT_EQ(mixed.size(), 7u);
    for (const auto& [name, values] : mixed) {
      EXPECT_EQ(values, (is_own(name) ? own : global).at(name)) << name << " of " << run.to_string();
      EXPECT_NE(values, (is_own(name) ? global : own).at(name)) << name << " of " << run.to_string();
    }
  }

  void expect_bits_of_all(DeviceKind device) {
    int point = 0;
    for (const int ranks : {1, 3}) {
      for (const int stage : {0, 1, 2, 3}) {
        for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
          for (const char* optimizer : {"AdamW", "Adam", "SGD"}) {
            if (!swept(point++, 5)) continue;
            OddRun run;
            run.device = device;
            run.ranks = ranks;
            run.stage = stage;
            run.optimizer = optimizer;
            run.dtype = point % 2 == 0 ? DataType::bfloat16 : DataType::float32;
            run.accumulation = 1 + point % 2;
            run.offload.optimizer = tier;
            if (stage == 3) run.offload.parameters = tier;
            run.offload.ratio = point % 4 == 0 ? 0.5 : 1;
            expect_bits(run);
          }
        }
      }
    }
  }
};

#if defined(TRANCHE_ENGINE_TESTS_ON_GPU)
TEST_F(OwnGroups, HaveTheBitsOfAnEngineWithTheirValuesOnAGpu) {
  const detail::CudaProbe probe = detail::probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  expect_bits_of_all(DeviceKind::cuda);
}
#else
TEST_F(OwnGroups, HaveTheBitsOfAnEngineWithTheirValues) {
  expect_bits_of_all(DeviceKind::cpu);
}

TEST_F(OwnGroups, ArePlannedToTheByte) {
  for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu}) {
    OddRun run;
    run.ranks = 2;
    run.stage = 2;
    run.offload.optimizer = tier;
    std::vector<TierAccount> measured, planned;
    const auto train = [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < 3; ++step) {
        whole_step(engine, runtime, step);
        engine.step();
      }
      if (runtime.rank() != 0) return;
      auto& into = engine.device().kind() == DeviceKind::meta ? planned : measured;
      for (const Tier of : {Tier::device, Tier::host}) into.push_back(runtime.ledger().account(of));
    };
    on_ranks(run, train, [](Config& config, RuntimeOptions&) { with_own_groups(config); });
    Config config = odd_config(run);
    with_own_groups(config);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.device = DeviceKind::meta;
    Runtime runtime(options,
                    [](const CommunicatorOptions& of) { return make_meta_communicator(0, 2, 2, of); });
    Engine engine(runtime, odd_model(), config);
    train(engine, runtime);
    ASSERT_EQ(measured.size(), planned.size());
    for (std::size_t t = 0; t < planned.size(); ++t) {
      EXPECT_EQ(measured[t].peak, planned[t].peak);
      EXPECT_EQ(measured[t].persistent.bytes, planned[t].persistent.bytes);
    }
  }
}

TEST_F(OwnGroups, AreRefusedWhereTheRuleHasNoSuchValue) {
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  const auto message = [](const char* optimizer, const ParameterGroupRule& rule,
                          std::unique_ptr<Optimizer> own = nullptr) {
    Config config = odd_config({});
    config.optimizer.type = optimizer;
    config.optimizer.parameters.erase("momentum");
    config.group_rules = {rule};
    Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
    return message_of<ConfigurationError>(
        [&] { Engine engine(runtime, odd_model(), config, std::move(own)); });
  };
  ParameterGroupRule betas{.pattern = "tied.b", .learning_rate_factor = {}, .decay = {}};
  betas.betas = {0.5, 0.5};
  EXPECT_THAT(message("SGD", betas),
              AllOf(HasSubstr("tranche.parameter_groups, tensor tied.b"),
                    HasSubstr("SGD: a parameter group sets betas, which SGD has not")));
  ParameterGroupRule epsilon{.pattern = "tied.b", .learning_rate_factor = {}, .decay = {}};
  epsilon.epsilon = 0.5;
  EXPECT_THAT(message("SGD", epsilon), HasSubstr("sets eps, which SGD has not"));

  /// An optimizer that supports only what groups had before they had values of their own.
  class Old final : public Optimizer {
   public:
    std::string name() const override { return "Old"; }
    std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override { return {}; }
    void apply(Stream&, const OptimizerStep&, const UpdateRange&) const override {}
    std::string describe() const override { return "{}"; }
  };
  EXPECT_THAT(message("AdamW", betas, std::make_unique<Old>()),
              AllOf(HasSubstr("Old: it does not say that it honours a parameter group's own betas"),
                    HasSubstr("Optimizer::check_group()")));
  ParameterGroupRule rate{.pattern = "tied.b", .learning_rate_factor = {}, .decay = {}};
  rate.learning_rate = 0.5;
  EXPECT_THAT(message("AdamW", rate, std::make_unique<Old>()), HasSubstr("group's own learning_rate"));
}
#endif

}  // namespace
}  // namespace tranche::test
