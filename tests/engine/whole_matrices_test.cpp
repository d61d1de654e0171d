// Muon in an engine: each matrix is updated once, on one rank, on every tier. optimizer_rules_test.cpp
// applies its tests to Muon as well.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/reference/newton_schulz.h"
#include "on_ranks.h"
#include "same_bits.h"
#include "saving_fixture.h"
#include "tests/core/rounds.h"
#include "tranche/kernels/newton_schulz.h"
#include "tranche/optim/rules.h"

namespace tranche::test {
namespace {

OddRun muon(int ranks, int stage, DataType dtype = DataType::bfloat16) {
  OddRun run;
  run.ranks = ranks;
  run.stage = stage;
  run.dtype = dtype;
  run.policy = ReductionPolicy::micro_batch;
  run.optimizer = "Muon";
  run.parameters = {{"weight_decay", 0.1}};
  run.steps = 3;
  run.offload.tile_elements = 4096;
  run.offload.nvme_path = std::filesystem::temp_directory_path().string();
  return run;
}

TEST(WholeMatrices, SendWhatThePlanSaysInEveryStageTierAndMesh) {
  int point = 0;
  for (const int ranks : {1, 2, 3, 4, 5}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
        if ((stage == 0 && tier != OffloadTier::none) || !swept(point++)) continue;
        OddRun run = muon(ranks, stage);
        run.offload.optimizer = tier;
        const OddResult result = train_odd(run);
        EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
        EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
      }
    }
  }
  for (const char* mesh : {"replicate=2, shard=2", "shard=2, replicate=2"}) {
    for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
      for (int stage = replicate == Replicate::all ? 0 : 1; stage <= 3; ++stage) {
        if (!swept(point++)) continue;
        OddRun run = muon(4, stage);
        run.mesh = mesh;
        run.replicate = replicate;
        const OddResult result = train_odd(run);
        EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
        EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
      }
    }
  }
}

TEST(WholeMatrices, ArePlannedByAMetaRankWithItsTraffic) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
      if (stage == 0 && tier != OffloadTier::none) continue;
      OddRun run = muon(3, stage);
      run.offload.optimizer = tier;
      const OddResult real = train_odd(run);
      run.device = DeviceKind::meta;
      const OddResult planned = train_odd(run);
      EXPECT_EQ(real.wire_elements[0], planned.wire_elements[0]) << run.to_string();
      EXPECT_EQ(real.wire_bytes[0], planned.wire_bytes[0]) << run.to_string();
      EXPECT_EQ(real.accounts[0].peak, planned.accounts[0].peak) << run.to_string();
      EXPECT_EQ(real.host_accounts[0].peak, planned.host_accounts[0].peak) << run.to_string();
      EXPECT_EQ(real.memory_calls_per_late_step[0], 0) << run.to_string();
    }
  }
}

/// A Muon that counts the tensors that it receives whole.
class Counting : public Optimizer {
 public:
  explicit Counting(std::atomic<int>& count) : muon_(make_rule_optimizer("Muon", {})), count_(count) {}
  std::string name() const override { return muon_->name(); }
  std::vector<OptimizerStateTensor> state(const TrainableTensor& tensor) const override {
    return muon_->state(tensor);
  }
  std::vector<std::byte> numbers(const OptimizerStep& step, const GroupOptions& group) const override {
    return muon_->numbers(step, group);
  }
  bool needs_whole_matrices(const TrainableTensor& tensor) const override {
    return muon_->needs_whole_matrices(tensor);
  }
  MatrixWork whole_work(const TrainableTensor& tensor) const override { return muon_->whole_work(tensor); }
  void prepare(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const override {
    muon_->prepare(stream, step, range);
  }
  void whole(Stream& stream, const OptimizerStep& step, const TrainableTensor& tensor,
             const TensorView& message, const kernels::Workspace& scratch) const override {
    ++count_;
    muon_->whole(stream, step, tensor, message, scratch);
  }
  void apply(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const override {
    muon_->apply(stream, step, range);
  }
  std::string describe() const override { return muon_->describe(); }

 private:
  std::unique_ptr<Optimizer> muon_;
  std::atomic<int>& count_;
};

// Skipped steps update no matrix, although the same messages are sent. Their state does not change.
TEST(WholeMatrices, AreComputedOnceAStepThatIsApplied) {
  for (const int accumulation : {1, 4}) {
    for (const int ranks : {1, 3}) {
      for (int stage = 0; stage <= 3; ++stage) {
        OddRun run = muon(ranks, stage);
        run.accumulation = accumulation;
        std::atomic<int> count = 0;
        run_thread_ranks(ranks, [&](int rank, const CommunicatorFactory& factory) {
          const Config config = odd_config(run);
          RuntimeOptions options = RuntimeOptions::from(config);
          options.log_level = LogLevel::off;
          Runtime runtime(options, factory);
          Engine engine(runtime, odd_model(), config, std::make_unique<Counting>(count));
          whole_step(engine, runtime, 0);
          EXPECT_TRUE(engine.step().applied);
          const auto barrier = [&] {
            runtime.all().barrier(OperationLabel{"test", "count", Traffic::control, Tier::host}).wait();
          };
          barrier();
          EXPECT_EQ(count, 2) << run.to_string();  // tied.b and mixed.f
          const std::string applied = engine.traffic_report();
          const kernels::Digest before = engine.state_digest();
          barrier();
          whole_step(engine, runtime, 1, "mixed.f");
          EXPECT_FALSE(engine.step().applied);
          barrier();
          EXPECT_EQ(count, 2) << run.to_string();
          EXPECT_EQ(engine.traffic_report(), applied) << run.to_string();
          EXPECT_EQ(engine.state_digest(), before) << run.to_string() << " " << rank;
        });
      }
    }
  }
}

// One step from zero momentum, computed in fp64: u is (1 - mu^2) g, and its orthogonal factor does not depend
// on that scale.
TEST(WholeMatrices, MoveWeightsAlongTheOrthogonalFactorOfTheMeanGradient) {
  for (int stage = 0; stage <= 3; ++stage) {
    OddRun run = muon(3, stage, DataType::float32);
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      const std::vector<float> gradient = engine.read_gradient("mixed.f");
      const std::vector<float> before = engine.read_weight("mixed.f");
      const StepResult result = engine.step();
      ASSERT_TRUE(result.applied);
      const std::vector<float> after = engine.read_weight("mixed.f");
      const std::vector<float> momentum = engine.read_optimizer_state("mixed.f", "momentum_buffer");
      const std::vector<double> exact(gradient.begin(), gradient.end());
      const std::vector<double> factor =
          kernels::reference::newton_schulz(kernels::polar_express_steps, 1.02, 13, 11, exact);
      const double rate = result.learning_rate, scale = 0.2 * std::sqrt(13.0);
      double error = 0, all = 0;
      for (std::size_t i = 0; i < before.size(); ++i) {
        const double moved = (1 - rate * 0.1) * before[i] - after[i], wanted = rate * scale * factor[i];
        error += (moved - wanted) * (moved - wanted);
        all += wanted * wanted;
        EXPECT_NEAR(momentum[i], 0.05 * result.clip_coefficient * exact[i], 1e-6);
      }
      // Messages are fp32, as the compute dtype is.
      EXPECT_LE(std::sqrt(error / all), 1e-4) << run.to_string();
    });
  }
}

TEST(WholeMatrices, GiveTheSameBitsWithoutOverlapAndWithoutPlannedMemory) {
  int point = 0;
  for (const int ranks : {1, 2, 4, 5}) {
    const OddRun first = muon(ranks, 0);
    const OddResult expected = train_odd(first);
    for (int stage = 0; stage <= 3; ++stage) {
      for (const bool overlap : {false, true}) {
        OddRun run = muon(ranks, stage);
        run.overlap = overlap;
        run.plan_memory = overlap;
        run.poison = true;
        const auto expect_the_same = [&] {
          if (swept(point++, 5)) expect_same(expected, train_odd(run), run);
        };
        expect_the_same();
        if (stage == 0) continue;
        for (const OffloadTier tier : {OffloadTier::cpu, OffloadTier::nvme}) {
          run.offload.optimizer = tier;
          expect_the_same();
        }
        if (stage < 3) continue;
        run.offload.parameters = OffloadTier::cpu;
        expect_the_same();
        run.offload.optimizer = OffloadTier::none;
        expect_the_same();
      }
    }
  }
}

TEST(WholeMatrices, AreRefusedWhereTheyCannotBe) {
  const auto refusal = [](const OddRun& run, ModelSpec model) {
    std::string message;
    try {
      const Config config = odd_config(run);
      Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
      const Engine engine(runtime, std::move(model), config);
    } catch (const ConfigurationError& error) {
      message = error.message();
    }
    return message;
  };
  ModelSpec untagged;
  untagged.add_unit({"u", {{"w", Shape{4, 4}, Initializer::ones()}}, 1});
  OddRun run = muon(1, 1);
  run.frozen = false;
  EXPECT_EQ(refusal(run, untagged),
            "optimizer Muon: the model marks none of its trained tensors as a hidden matrix "
            "(TensorSpec::matrices), so AdamW would update all of them; choose AdamW, or mark the matrices");
}

// The stage in the middle, which does not hold the tensor, refuses with the same text.
TEST(WholeMatrices, ThatStagesShareAreRefusedOverReplicasByAllRanks) {
  ModelSpec model;
  const auto unit = [](const char* name, int uses) {
    return UnitSpec{name,
                    {{.name = std::string(name) + ".w",
                      .shape = Shape{4, 4},
                      .initializer = Initializer::ones(),
                      .matrices = 1}},
                    uses};
  };
  const UnitId ends = model.add_unit(unit("ends", 2)), middle = model.add_unit(unit("middle", 1));
  model.forward = {{ends, 0, 1}, {middle, 0, 1}, {ends, 1, 1}};
  model.residual_width = 4;
  constexpr int ranks = 6;
  OddRun run = muon(ranks, 1);
  run.frozen = false;
  run.mesh = "replicate=2, pipeline=3";
  run.replicate = Replicate::parameters;
  std::vector<std::string> messages(ranks);
  run_thread_ranks(ranks, [&](int rank, const CommunicatorFactory& factory) {
    Config config = odd_config(run);
    config.pipeline_cuts = PipelineCuts::equal;
    config.train_batch_size = 0;  // for two data ranks
    Runtime runtime(RuntimeOptions::from(config), factory);
    try {
      const Engine engine(runtime, model, config);
    } catch (const ConfigurationError& error) {
      messages[static_cast<std::size_t>(rank)] = error.message();
    }
  });
  EXPECT_THAT(messages, testing::Each("tranche.replicate parameters: stages of the pipeline share tensor "
                                      "ends.w, which its optimizer updates as a whole matrix; write all, or "
                                      "leave it out"));
}

// The disk has no AdamW state beside the matrices, as with adapters alone.
TEST(WholeMatrices, MayBeAllThatIsTrained) {
  for (const int ranks : {1, 3}) {
    std::optional<kernels::Digest> digest;
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
      OddRun run = muon(ranks, 2);
      run.offload.optimizer = tier;
      on_ranks(
          run,
          [&](Engine& engine, Runtime& runtime) {
            for (int step = 0; step < 3; ++step) {
              whole_step(engine, runtime, step);
              EXPECT_TRUE(engine.step().applied);
            }
            const kernels::Digest state = engine.state_digest();
            if (runtime.rank() != 0) return;
            if (!digest) digest = state;
            EXPECT_EQ(*digest, state) << run.to_string();
          },
          [](Config& config, RuntimeOptions&) {
            config.frozen = {"tied.a", "prime.*", "tiny.*", "mixed.frozen", "mixed.g"};
          });
    }
  }
}

class WholeMatricesSaving : public Saving {};

// A background save contains the state at its call, although the next step updates it.
TEST_F(WholeMatricesSaving, KeepsTheStateOfTheCallInEveryTier) {
  for (const int ranks : {1, 3}) {
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
      std::filesystem::remove_all(path());
      OddRun run = muon(ranks, 2);
      run.offload.optimizer = tier;
      kernels::Digest saved, loaded;
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        for (int step = 0; step < 2; ++step) {
          whole_step(engine, runtime, step);
          EXPECT_TRUE(engine.step().applied);
        }
        const kernels::Digest digest = engine.state_digest();
        engine.save(path());
        whole_step(engine, runtime, 2);
        EXPECT_TRUE(engine.step().applied);
        (void)engine.finish_saving();
        if (runtime.rank() == 0) saved = digest;
      });
      run = muon(ranks == 1 ? 2 : 1, 1);
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        engine.load(path());
        const kernels::Digest digest = engine.state_digest();
        if (runtime.rank() == 0) loaded = digest;
      });
      EXPECT_EQ(saved, loaded) << ranks << " ranks, " << name_of(tier);
    }
  }
}

TEST(WholeMatrices, AreNamedInTheTableOfTheStart) {
  on_ranks(muon(2, 1), [](Engine& engine, Runtime& runtime) {
    if (runtime.rank() != 0) return;
    const std::string text = engine.summary();
    EXPECT_NE(text.find("Muon 2 tensors of 3 matrices (335 elements), AdamW 5 tensors (1320 elements)"),
              text.npos)
        << text;
    EXPECT_NE(text.find(" matrices to their owners and back (no owner has more than "), text.npos) << text;
  });
}

}  // namespace
}  // namespace tranche::test
