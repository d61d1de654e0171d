// Master weights in formats other than fp32 (tranche.master, tranche.stochastic_rounding) in an engine: the
// same bits for every tier and partition, plans that equal the ledger, and checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/folder.h"
#include "core/split_float.h"
#include "offload/file_system.h"
#include "on_ranks.h"
#include "same_bits.h"
#include "saving_fixture.h"
#include "tests/core/rounds.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

struct MasterRule {
  std::string type;
  RuleParameters parameters;
};
const std::vector<MasterRule>& master_rules() {
  static const std::vector<MasterRule> all = {{"AdamW", {{"weight_decay", 0.1}}},
                                              {"Adagrad", {}},
                                              {"LARS", {{"trust_coefficient", 0.1}, {"weight_decay", 0.1}}},
                                              {"Lamb", {{"weight_decay", 0.1}}},
                                              {"Lion", {{"weight_decay", 0.1}}},
                                              {"Muon", {{"weight_decay", 0.1}, {"adam_lr", 0.01}}},
                                              {"RMSprop", {{"momentum", 0.5}, {"eps", 1e-3}}},
                                              {"SGD", {{"momentum", 0.9}}}};
  return all;
}

struct Kept {
  MasterFormat master;
  bool at_random;
};
constexpr Kept kept_formats[] = {
    {MasterFormat::split, false}, {MasterFormat::none, false}, {MasterFormat::none, true}};

OddRun master_run(const MasterRule& rule, int ranks, const Kept& kept) {
  OddRun run;
  run.large = true;
  run.ranks = ranks;
  run.dtype = DataType::bfloat16;
  run.policy = ReductionPolicy::micro_batch;
  run.accumulation = 2;
  run.steps = 3;
  run.optimizer = rule.type;
  run.parameters = rule.parameters;
  run.master = kept.master;
  run.stochastic_rounding = kept.at_random;
  return run;
}

/// Includes parameters off the device, on the optimizer state's tier or on another, and a part of the state
/// on the device.
void expect_the_same_off_the_device(const OddResult& expected, OddRun run) {
  run.offload.tile_elements = 4096;
  run.offload.nvme_path = std::filesystem::temp_directory_path().string();
  run.stage = 3;
  for (const auto& [optimizer, parameters] :
       {std::pair(OffloadTier::cpu, OffloadTier::cpu), std::pair(OffloadTier::none, OffloadTier::cpu),
        std::pair(OffloadTier::nvme, OffloadTier::nvme), std::pair(OffloadTier::cpu, OffloadTier::nvme)}) {
    run.offload.optimizer = optimizer;
    run.offload.parameters = parameters;
    expect_same(expected, train_odd(run), run);
  }
  run.offload.parameters = OffloadTier::none;
  run.offload.optimizer = OffloadTier::cpu;
  run.offload.ratio = 0.5;
  expect_same(expected, train_odd(run), run);
}

TEST(MasterFormats, GiveTheSameBitsOverStagesTiersAndBuckets) {
  int turn = 0;
  for (const MasterRule& rule : master_rules()) {
    for (const Kept& kept : kept_formats) {
      if (!swept(turn, 11)) {
        ++turn;
        continue;
      }
      OddRun run = master_run(rule, 1 + turn % 5, kept);
      if (turn % 3 == 0 && rule.type != "Adagrad") run.moments = DataType::block8;
      const OddResult expected = expect_the_same_everywhere(run);
      expect_the_same_off_the_device(expected, run);
      ++turn;
      if (HasFailure()) return;
    }
  }
}

class MasterFormatsSlow : public Saving {};

TEST_F(MasterFormatsSlow, GiveTheSameBitsOverStagesTiersAndBuckets) {
  for (const MasterRule& rule : master_rules()) {
    for (const Kept& kept : kept_formats) {
      for (const DataType moments : {DataType::float32, DataType::bfloat16, DataType::block8}) {
        if (rule.type == "Adagrad" && moments != DataType::float32) continue;
        for (int ranks = 1; ranks <= 5; ++ranks) {
          OddRun run = master_run(rule, ranks, kept);
          run.moments = moments;
          const OddResult expected = expect_the_same_everywhere(run);
          expect_the_same_off_the_device(expected, run);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(MasterFormats, GiveTheSameBitsOnAnyNumberOfRanksAndOnMeshes) {
  for (const Kept& kept : kept_formats) {
    expect_the_same_on_any_ranks(master_run({"AdamW", {{"weight_decay", 0.1}}}, 1, kept),
                                 kept.at_random ? 8 : 4);
    expect_the_same_on_meshes(master_run({"Lamb", {{"weight_decay", 0.1}}}, 4, kept));
  }
}

// Training reads int8 blocks of the weights; updates start from the weights before quantization.
TEST(MasterFormats, StayExactBesideWeightsInInt8Blocks) {
  for (const Kept& kept : kept_formats) {
    OddRun run = master_run({"AdamW", {}}, 2, kept);
    run.quantized_weights = true;
    const OddResult expected = train_odd(run);
    for (run.stage = 1; run.stage <= 3; ++run.stage) expect_same(expected, train_odd(run), run);
  }
}

// The halves are on the device, or a separate tier holds the fp32 numbers.
TEST(MasterFormats, HalvesAreTheFp32MasterOverAThousandSteps) {
  OddRun run = master_run({"AdamW", {{"weight_decay", 0.01}}}, 1, {MasterFormat::split, false});
  run.large = false;
  run.single_unit = true;
  run.frozen = false;
  run.accumulation = 1;
  run.steps = 1000;
  OddRun other = run;
  other.offload.optimizer = OffloadTier::cpu;
  expect_same(train_odd(run), train_odd(other), other);
}

// An element's draw depends on the seed, the applied step, its tensor and its index in it.
TEST(MasterFormats, AtRandomAreRoundedByTheDrawsOfTheirTensor) {
  OddRun run = master_run({"SGD", {}}, 3, {MasterFormat::none, true});
  run.stage = 3;
  run.accumulation = 1;
  run.clipping = 0;
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    for (int step = 0; step < 2; ++step) {
      std::vector<std::vector<float>> before, gradients, momentum;
      const char* const names[] = {"tied.a", "tied.b", "large.h", "large.i", "large.j"};
      whole_step(engine, runtime, step);
      for (const char* name : names) {
        before.push_back(engine.read_weight(name));
        gradients.push_back(engine.read_gradient(name));
        momentum.push_back(engine.read_optimizer_state(name, "momentum_buffer"));
      }
      engine.step();
      for (std::size_t t = 0; t < std::size(names); ++t) {
        const RandomKey stream = detail::rounding_stream(engine.config().seed, step + 1, t);
        const std::vector<float> after = engine.read_weight(names[t]);
        for (std::size_t i = 0; i < after.size(); ++i) {
          const float g = gradients[t][i];
          const float b = step == 0 ? g : 0.9f * momentum[t][i] + g;
          const auto element = static_cast<std::int64_t>(i);
          const auto block = random_block(stream, i / 8);
          const float wanted = to_float(
              detail::round_stochastically(before[t][i] - 0.05f * b, detail::rounding_draw(block, element)));
          ASSERT_EQ(after[i], wanted) << names[t] << " at " << i << ", step " << step;
        }
      }
    }
  });
}

// The bits differ from those of weights without a master, and from those of another rounding.
TEST(MasterFormats, AreDifferentNumbers) {
  std::vector<OddResult> results;
  for (const Kept& kept : kept_formats) results.push_back(train_odd(master_run({"AdamW", {}}, 2, kept)));
  results.push_back(train_odd(master_run({"AdamW", {}}, 2, {MasterFormat::fp32, false})));
  for (std::size_t a = 0; a < results.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      // Weights of the fp32 master are rounded to even, which changes few of them in three steps.
      if (a == 3 && b == 0) continue;
      EXPECT_FALSE(results[a].weights == results[b].weights) << a << " and " << b;
    }
  }
}

TEST(MasterFormats, ArePlannedToTheByte) {
  for (const Kept& kept : kept_formats) {
    for (const auto& [optimizer, parameters] :
         {std::pair(OffloadTier::none, OffloadTier::none), std::pair(OffloadTier::cpu, OffloadTier::none),
          std::pair(OffloadTier::cpu, OffloadTier::cpu), std::pair(OffloadTier::nvme, OffloadTier::none)}) {
      OddRun run = master_run({"AdamW", {}}, 3, kept);
      run.stage = parameters == OffloadTier::none ? 2 : 3;
      run.accumulation = 1;
      run.offload.optimizer = optimizer;
      run.offload.parameters = parameters;
      run.offload.tile_elements = 4096;
      run.offload.nvme_path = std::filesystem::temp_directory_path().string();
      std::vector<TierAccount> measured, planned;
      OffloadTraffic moved, predicted;
      Engine::StateBytes formula;
      const auto train = [&](Engine& engine, Runtime& runtime) {
        StepResult last;
        for (int step = 0; step < 3; ++step) {
          whole_step(engine, runtime, step);
          last = engine.step();
        }
        if (runtime.rank() != 0) return;
        const bool plan = engine.device().kind() == DeviceKind::meta;
        for (const Tier of : {Tier::device, Tier::host, Tier::nvme}) {
          (plan ? planned : measured).push_back(runtime.ledger().account(of));
        }
        (plan ? predicted : moved) = last.offload_traffic;
        formula = engine.state_bytes();
      };
      on_ranks(run, train);
      // Each element whose state this rank keeps has an fp32 gradient here.
      const bool beside = optimizer == parameters && optimizer != OffloadTier::nvme;
      const bool alone = kept.master == MasterFormat::none;
      const std::int64_t each = alone ? (beside ? 0 : 2) : (beside ? 2 : 4);
      EXPECT_EQ(formula.optimizer % (each + 8), 0) << run.to_string();
      EXPECT_EQ(formula.optimizer / (each + 8), formula.gradients / 4) << run.to_string();
      const Config config = odd_config(run);
      RuntimeOptions options = RuntimeOptions::from(config);
      options.device = DeviceKind::meta;
      Runtime runtime(options,
                      [](const CommunicatorOptions& of) { return make_meta_communicator(0, 3, 3, of); });
      Engine engine(runtime, odd_model(false, true), config);
      train(engine, runtime);
      for (std::size_t t = 0; t < planned.size(); ++t) {
        EXPECT_EQ(measured[t].peak, planned[t].peak) << run.to_string() << ", tier " << t;
        EXPECT_EQ(measured[t].persistent.bytes, planned[t].persistent.bytes) << run.to_string();
      }
      EXPECT_EQ(moved.nvme_read, predicted.nvme_read) << run.to_string();
      EXPECT_EQ(moved.to_host, predicted.to_host) << run.to_string();
    }
  }
}

TEST(MasterFormats, AreReadAndWrittenAsNumbers) {
  for (const Kept& kept : kept_formats) {
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
      OddRun run = master_run({"AdamW", {}}, 3, kept);
      run.stage = 3;
      run.offload.optimizer = run.offload.parameters = tier;
      run.offload.tile_elements = 4096;
      run.offload.nvme_path = std::filesystem::temp_directory_path().string();
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        std::vector<float> values(4603);
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] = static_cast<float>(i % 97) * 1.001e-3f - 0.03f;
        values[5] = 1 + 0x1p-8f;  // halfway between two bf16 numbers
        engine.write_weight("large.i", values);
        std::vector<float> wanted = values;
        for (float& value : wanted) {
          if (kept.master == MasterFormat::none) value = to_float(to_bfloat16(value));
        }
        EXPECT_EQ(engine.read_weight("large.i"), wanted) << run.to_string();
        whole_step(engine, runtime, 0);
        EXPECT_TRUE(engine.step().applied);
        EXPECT_NE(engine.read_weight("large.i"), wanted);
      });
    }
  }
}

// A skipped step changes and draws nothing, so the next step equals that of a run without it.
TEST(MasterFormats, KeepTheirBitsInASkippedStep) {
  int point = 0;
  for (const Kept& kept : kept_formats) {
    for (const char* type : {"AdamW", "Lamb", "Muon"}) {
      for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
        if (!swept(point++, 5)) continue;
        OddRun run = master_run({type, {}}, 2, kept);
        run.stage = 3;
        run.offload.optimizer = tier;
        run.offload.parameters = tier == OffloadTier::cpu ? tier : OffloadTier::none;
        run.offload.tile_elements = 4096;
        run.offload.nvme_path = std::filesystem::temp_directory_path().string();
        const auto trained = [&](bool skips) {
          return digest_after(run, [&](Engine& engine, Runtime& runtime) {
            whole_step(engine, runtime, 0);
            engine.step();
            if (skips) {
              const kernels::Digest before = engine.state_digest();
              whole_step(engine, runtime, 7, "large.i");
              EXPECT_FALSE(engine.step().applied);
              EXPECT_EQ(engine.state_digest(), before) << run.to_string();
            }
            whole_step(engine, runtime, 1);
            EXPECT_TRUE(engine.step().applied);
          });
        };
        EXPECT_EQ(trained(true), trained(false)) << run.to_string();
      }
    }
  }
}

// --- Checkpoints ----------------------------------------------------------------------------------------

class MasterCheckpoints : public Saving {
 protected:
  kernels::Digest save(const OddRun& run, const std::string& name, int steps = 2) {
    return digest_after(run, [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < steps; ++step) {
        whole_step(engine, runtime, step);
        engine.step();
      }
      engine.save(path(name), {.wait = true});
    });
  }
  void expect_kept(int from, int to, const Kept& kept) {
    std::filesystem::remove_all(path());
    OddRun run = master_run({"AdamW", {{"weight_decay", 0.1}}}, from, kept);
    run.moments = DataType::block8;
    run.stage = 1 + from % 3;
    const kernels::Digest saved = save(run, "first");
    run.ranks = to;
    run.stage = to % 4;
    run.offload.tile_elements = 4096;
    run.offload.nvme_path = path();
    run.offload.optimizer = to % 3 == 0   ? OffloadTier::cpu
                            : to % 3 == 1 ? OffloadTier::none
                                          : OffloadTier::nvme;
    run.offload.parameters = run.stage == 3 ? run.offload.optimizer : OffloadTier::none;
    const kernels::Digest loaded = digest_after(run, [&](Engine& engine, Runtime&) {
      engine.load(path("first"));
      engine.save(path("second"), {.wait = true});
    });
    EXPECT_EQ(saved, loaded) << from << " to " << to << ", " << run.to_string();
    run.ranks = from;
    run.offload = {};
    const kernels::Digest back =
        digest_after(run, [&](Engine& engine, Runtime&) { engine.load(path("second")); });
    EXPECT_EQ(saved, back) << to << " to " << from << ", " << run.to_string();
  }
};

TEST_F(MasterCheckpoints, KeepEveryBitOnOtherNumbersOfRanks) {
  const std::vector<int> ranks = sanitized ? std::vector{1, 3, 2} : std::vector{1, 3, 8, 2, 6, 4, 1};
  int point = 0;
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    for (const Kept& kept : kept_formats) {
      if (swept(point++)) expect_kept(ranks[i - 1], ranks[i], kept);
    }
  }
}

class MasterCheckpointsSlow : public MasterCheckpoints {};

TEST_F(MasterCheckpointsSlow, KeepEveryBitOnOtherNumbersOfRanks) {
  for (const int from : {1, 2, 3, 4, 6, 8}) {
    for (const int to : {1, 2, 3, 4, 6, 8}) {
      for (const Kept& kept : kept_formats) expect_kept(from, to, kept);
    }
  }
}

// A run continues with the bits and draws that it would have had.
TEST_F(MasterCheckpoints, GoOnWithTheSameBits) {
  for (const Kept& kept : kept_formats) {
    OddRun run = master_run({"AdamW", {{"weight_decay", 0.1}}}, 3, kept);
    run.stage = 2;
    const auto rest = [&](Engine& engine, Runtime& runtime) {
      for (int step = 2; step < 4; ++step) {
        whole_step(engine, runtime, step);
        engine.step();
      }
    };
    const std::string name = std::string(name_of(kept.master)) + (kept.at_random ? " at random" : "");
    const kernels::Digest whole = digest_after(run, [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < 2; ++step) {
        whole_step(engine, runtime, step);
        engine.step();
      }
      engine.save(path(name), {.wait = true});
      rest(engine, runtime);
    });
    const kernels::Digest resumed = digest_after(run, [&](Engine& engine, Runtime& runtime) {
      engine.load(path(name));
      rest(engine, runtime);
    });
    EXPECT_EQ(whole, resumed) << name;
  }
}

// Halves are saved as the fp32 numbers that they form; bf16 alone is another format.
TEST_F(MasterCheckpoints, OfAnotherFormatAreConvertedOnRequest) {
  std::vector<float> saved[3];
  const Kept all[] = {{MasterFormat::fp32, false}, {MasterFormat::split, false}, {MasterFormat::none, false}};
  for (std::size_t i = 0; i < 3; ++i) {
    OddRun run = master_run({"AdamW", {}}, 2, all[i]);
    run.stage = 2;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      engine.step();
      engine.save(path(std::to_string(i)), {.wait = true});
      std::vector<float> values = engine.read_weight("large.i");
      if (runtime.rank() == 0) saved[i] = std::move(values);
    });
  }
  for (std::size_t from = 0; from < 3; ++from) {
    for (std::size_t to = 0; to < 3; ++to) {
      OddRun run = master_run({"AdamW", {}}, 3, all[to]);
      run.stage = 3;
      const std::string folder = path(std::to_string(from));
      const bool converts =
          (all[from].master == MasterFormat::none) != (all[to].master == MasterFormat::none);
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        if (converts) {
          const bool to_bf16 = all[to].master == MasterFormat::none;
          EXPECT_THAT(message_of<CheckpointError>([&] { engine.load(folder); }),
                      AllOf(HasSubstr("weight of tensor tied.a is in " +
                                      std::string(to_bf16 ? "fp32" : "bf16") + " in "),
                            HasSubstr(", but in " + std::string(to_bf16 ? "bf16" : "fp32") +
                                      " in this run (tranche.master); --convert-state "
                                      "(LoadOptions::convert_state) converts it")));
        }
        engine.load(folder, {.convert_state = converts});
        std::vector<float> wanted = saved[from];
        for (float& value : wanted) {
          if (all[to].master == MasterFormat::none) value = to_float(to_bfloat16(value));
        }
        EXPECT_EQ(engine.read_weight("large.i"), wanted) << from << " to " << to;
        whole_step(engine, runtime, 1);
        EXPECT_TRUE(engine.step().applied);
      });
      // Weights alone can be loaded from any format.
      on_ranks(run, [&](Engine& engine, Runtime&) { engine.load(folder, {.weights_only = true}); });
    }
  }
}

/// A program's rule that supports only fp32 master weights.
class OwnDescent final : public Optimizer {
 public:
  std::string name() const override { return "OwnDescent"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override { return {}; }
  void apply(Stream&, const OptimizerStep&, const UpdateRange&) const override {}
  std::string describe() const override { return "{}"; }
};

TEST(MasterFormats, AreRefusedForOptimizersThatDoNotKnowThem) {
  for (const Kept& kept : kept_formats) {
    OddRun run = master_run({"AdamW", {}}, 1, kept);
    const Config config = odd_config(run);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.log_level = LogLevel::off;
    run_thread_ranks(1, [&](int, const CommunicatorFactory& factory) {
      Runtime runtime(options, factory);
      EXPECT_EQ(message_of<ConfigurationError>([&] {
                  const Engine engine(runtime, odd_model(), config, std::make_unique<OwnDescent>());
                }),
                "tranche.master: optimizer OwnDescent updates fp32 master weights alone, not " +
                    std::string(name_of(kept.master)) + " (Optimizer::takes_master_formats)");
    });
  }
}

}  // namespace
}  // namespace tranche::test
