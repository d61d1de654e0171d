// Compares the noise of a step's gradient (tranche.gradient_noise_scale) with sums over single gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <mutex>
#include <optional>
#include <vector>

#include "on_ranks.h"
#include "saving_fixture.h"

namespace tranche::test {
namespace {

using ::testing::ElementsAre;

OddRun noisy(int ranks, int stage, std::int64_t accumulation) {
  OddRun run;
  run.ranks = ranks;
  run.stage = stage;
  run.accumulation = accumulation;
  run.policy = ReductionPolicy::micro_batch;
  run.clipping = 0.1;
  run.offload.tile_elements = 4096;
  run.offload.nvme_path = std::filesystem::temp_directory_path().string();
  return run;
}

void measures(Config& config, RuntimeOptions&) {
  config.gradient_noise_scale = true;
  config.gradient_noise_smoothing = 0.5;
}

/// The number of samples of micro-batch `block` of the step; the numbers differ.
std::int64_t samples_of(std::int64_t block) {
  return block % 3 == 1 ? 1 : 3;
}

void uneven_step(Engine& engine, Runtime& runtime, std::int64_t step) {
  const std::int64_t rounds = engine.config().accumulation_steps;
  for (std::int64_t m = 0; m < rounds; ++m) {
    const std::int64_t block = (step * rounds + m) * runtime.size() + runtime.rank();
    odd_micro_batch(engine, 3 * block, samples_of(block));
  }
}

/// The gradient of `count` blocks from `first` on, computed by an engine of one rank with the initial
/// weights: its sum over tokens, and their number.
struct Summed {
  std::vector<double> sum;
  double tokens = 0;
  double squares() const {
    double total = 0;
    for (const double value : sum) total += value * value;
    return total;
  }
};
Summed single(std::int64_t block) {
  Summed result;
  OddRun run = noisy(1, 0, 1);
  run.policy = ReductionPolicy::automatic;
  on_ranks(run, [&](Engine& engine, Runtime&) {
    odd_micro_batch(engine, 3 * block, samples_of(block));
    for (const UnitSpec& unit : engine.model().units()) {
      for (const TensorSpec& tensor : unit.tensors) {
        if (engine.frozen(tensor.name)) continue;
        for (const float value : engine.read_gradient(tensor.name)) result.sum.push_back(value);
      }
    }
    result.tokens = static_cast<double>(engine.step().tokens);
    for (double& value : result.sum) value *= result.tokens;
  });
  return result;
}

/// The variance of a token's gradient and the squared norm of the true gradient, by the textbook formula,
/// from groups of blocks.
struct Wanted {
  double variance, squares, tokens = 0;
};
Wanted by_hand(const std::vector<std::vector<std::int64_t>>& pieces) {
  Summed all;
  double apart = 0;
  for (const std::vector<std::int64_t>& blocks : pieces) {
    Summed piece;
    for (const std::int64_t block : blocks) {
      const Summed one = single(block);
      piece.sum.resize(one.sum.size());
      for (std::size_t i = 0; i < one.sum.size(); ++i) piece.sum[i] += one.sum[i];
      piece.tokens += one.tokens;
    }
    apart += piece.squares() / piece.tokens;
    all.sum.resize(piece.sum.size());
    for (std::size_t i = 0; i < piece.sum.size(); ++i) all.sum[i] += piece.sum[i];
    all.tokens += piece.tokens;
  }
  Wanted wanted{};
  wanted.tokens = all.tokens;
  wanted.variance = (apart - all.squares() / all.tokens) / static_cast<double>(pieces.size() - 1);
  wanted.squares = (all.squares() / all.tokens - wanted.variance) / all.tokens;
  return wanted;
}

/// Expects the measured noise of the first step of `run` to be near `wanted`, and equal to `first` in every
/// bit if that has a value.
void expect_noise(const OddRun& run, const Wanted& wanted, std::optional<GradientNoise>& first,
                  const std::function<void(Config&, RuntimeOptions&)>& adjust = measures,
                  double tolerance = 1e-5) {
  std::mutex mutex;
  on_ranks(
      run,
      [&](Engine& engine, Runtime& runtime) {
        uneven_step(engine, runtime, 0);
        const StepResult result = engine.step();
        const std::lock_guard lock(mutex);
        ASSERT_TRUE(result.noise.measured) << run.to_string();
        EXPECT_LT(result.clip_coefficient, 1);
        if (!first) first = result.noise;
        EXPECT_EQ(first->variance, result.noise.variance) << run.to_string();
        EXPECT_EQ(first->squares, result.noise.squares) << run.to_string();
        const double samples = static_cast<double>(engine.config().train_batch_size) / wanted.tokens;
        EXPECT_NEAR(result.noise.variance, wanted.variance * samples, tolerance * wanted.variance * samples);
        EXPECT_NEAR(result.noise.squares, wanted.squares, tolerance * wanted.squares);
        EXPECT_EQ(result.noise.scale, result.noise.variance / result.noise.squares);
      },
      adjust);
}

/// The groups of blocks in one step: each micro-batch of each rank, or each rank's accumulated sum.
std::vector<std::vector<std::int64_t>> pieces_of(int ranks, std::int64_t accumulation, bool each) {
  std::vector<std::vector<std::int64_t>> pieces(each ? 0 : static_cast<std::size_t>(ranks));
  for (std::int64_t block = 0; block < accumulation * ranks; ++block) {
    if (each) {
      pieces.push_back({block});
    } else {
      pieces[static_cast<std::size_t>(block % ranks)].push_back(block);
    }
  }
  return pieces;
}

TEST(GradientNoise, IsThatOfSingleGradientsInEveryStageTierAndNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const ReductionPolicy policy : {ReductionPolicy::micro_batch, ReductionPolicy::boundary}) {
      const bool each = policy == ReductionPolicy::micro_batch;
      if (ranks == 1 && !each) continue;
      const Wanted wanted = by_hand(pieces_of(ranks, 2, each));
      std::optional<GradientNoise> first;
      for (int stage = 0; stage <= 3; ++stage) {
        for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
          if (stage == 0 && tier != OffloadTier::none) continue;
          OddRun run = noisy(ranks, stage, 2);
          run.policy = policy;
          run.offload.optimizer = tier;
          expect_noise(run, wanted, first);
        }
      }
    }
  }
}

TEST(GradientNoise, IsMeasuredOnReplicasAndBesideMatricesOfMuon) {
  const Wanted wanted = by_hand(pieces_of(4, 2, true));
  std::optional<GradientNoise> of_muon;
  for (const char* mesh : {"replicate=2, shard=*", "replicate=4, shard=*"}) {
    OddRun run = noisy(4, 3, 2);
    run.mesh = mesh;
    std::optional<GradientNoise> of_mesh;
    expect_noise(run, wanted, of_mesh);
  }
  OddRun muon = noisy(4, 2, 2);
  muon.optimizer = "Muon";
  expect_noise(muon, wanted, of_muon);
}

TEST(GradientNoise, IsThatOfGradientsBeforeTheyAreRounded) {
  // The error of a sum of int8 blocks is some 1e-4 of its square, and the variance is a tenth of that square
  // here.
  OddRun run = noisy(2, 2, 2);
  run.quantized_gradients = true;
  std::optional<GradientNoise> first;
  expect_noise(run, by_hand(pieces_of(2, 2, true)), first, measures, 2e-3);
}

TEST(GradientNoise, IsTheSameForEveryNumberOfRanksWhereTheWeightsAre) {
  std::vector<GradientNoise> first;
  std::mutex mutex;
  for (const int ranks : {1, 2, 3, 4}) {
    OddRun run = noisy(ranks, ranks % 4, 1);
    run.policy = ReductionPolicy::automatic;
    run.micro_batches = 5;  // the last round leaves ranks without samples
    std::vector<GradientNoise> mine;
    on_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          for (std::int64_t step = 0; step < 2; ++step) {
            for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
              const std::int64_t block = m * runtime.size() + runtime.rank();
              odd_micro_batch(engine, 3 * (5 * step + block), block < 5 ? 3 : 0);
            }
            const StepResult result = engine.step();
            const std::lock_guard lock(mutex);
            if (runtime.rank() == 0) mine.push_back(result.noise);
          }
        },
        measures);
    if (first.empty()) first = mine;
    for (std::size_t step = 0; step < 2; ++step) {
      EXPECT_TRUE(mine[step].measured);
      EXPECT_EQ(mine[step].variance, first[step].variance) << ranks << " ranks, step " << step;
      EXPECT_EQ(mine[step].squares, first[step].squares) << ranks << " ranks, step " << step;
      EXPECT_EQ(mine[step].scale, first[step].scale) << ranks << " ranks, step " << step;
    }
  }
}

/// The ratio that a step reports: a moving average over steps, in which each new one has the weight one half.
double averaged(const std::vector<GradientNoise>& steps) {
  double variance = 0, squares = 0;
  for (const GradientNoise& noise : steps) {
    variance = 0.5 * variance + 0.5 * noise.variance;
    squares = 0.5 * squares + 0.5 * noise.squares;
  }
  return squares > 0 ? variance / squares : std::numeric_limits<double>::infinity();
}

TEST(GradientNoise, KnowsNoLossScaleAndAveragesOverSteps) {
  std::vector<GradientNoise> plain, scaled;
  OddRun run = noisy(1, 0, 4);
  run.dtype = DataType::float16;
  run.communication = DataType::float32;
  for (const bool scales : {false, true}) {
    on_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          for (int step = 0; step < 3; ++step) {
            uneven_step(engine, runtime, step);
            (scales ? scaled : plain).push_back(engine.step().noise);
          }
        },
        [&](Config& config, RuntimeOptions& options) {
          measures(config, options);
          config.loss_scaling = true;
          config.loss_scaler.initial_scale = scales ? 1024 : 1;
        });
  }
  for (std::size_t step = 0; step < 3; ++step) {
    EXPECT_EQ(plain[step].variance, scaled[step].variance) << step;
    EXPECT_EQ(plain[step].squares, scaled[step].squares) << step;
    EXPECT_EQ(plain[step].scale, averaged({plain.begin(), plain.begin() + static_cast<long>(step) + 1}))
        << step;
  }
  EXPECT_NE(plain[1].scale, plain[1].variance / plain[1].squares) << "the average has an effect";
}

TEST(GradientNoise, StepsThatAreSkippedWrittenOrEvaluatedLeaveItsAverages) {
  OddRun run = noisy(2, 2, 2);
  run.dtype = DataType::float16;
  run.accumulation_dtype = DataType::float32;
  on_ranks(
      run,
      [&](Engine& engine, Runtime& runtime) {
        std::vector<GradientNoise> seen;
        uneven_step(engine, runtime, 0);
        seen.push_back(engine.step().noise);
        whole_step(engine, runtime, 1, runtime.rank() == 1 ? "mixed.g" : "");
        const StepResult skipped = engine.step();
        EXPECT_FALSE(skipped.applied);
        EXPECT_FALSE(skipped.noise.measured);
        engine.begin_evaluation();
        engine.end_evaluation();
        uneven_step(engine, runtime, 2);
        std::vector<float> values = engine.read_gradient("tiny.e");
        engine.write_gradient("tiny.e", values);
        EXPECT_FALSE(engine.step().noise.measured) << "a program has written the gradient";
        uneven_step(engine, runtime, 3);
        const StepResult last = engine.step();
        ASSERT_TRUE(last.noise.measured);
        EXPECT_EQ(last.loss_scale, skipped.loss_scale / 2);
        seen.push_back(last.noise);
        EXPECT_EQ(last.noise.scale, averaged(seen));
      },
      [](Config& config, RuntimeOptions& options) {
        measures(config, options);
        config.loss_scaling = true;
        config.loss_scaler.initial_scale = 64;
        config.loss_scaler.hysteresis = 1;
      });
}

class GradientNoiseSaving : public Saving {};

TEST_F(GradientNoiseSaving, AveragesGoOnWithARunThatIsResumed) {
  std::mutex mutex;
  std::optional<GradientNoise> through;
  on_ranks(
      noisy(2, 1, 2),
      [&](Engine& engine, Runtime& runtime) {
        uneven_step(engine, runtime, 0);
        engine.step();
        engine.save(path(), {.wait = true});
        uneven_step(engine, runtime, 1);
        const GradientNoise second = engine.step().noise;
        EXPECT_NE(second.scale, averaged({second}));
        EXPECT_THAT(engine.load(path()).notes, ElementsAre());
        uneven_step(engine, runtime, 1);
        EXPECT_EQ(engine.step().noise.scale, second.scale) << "the same engine";
        const std::lock_guard lock(mutex);
        through = second;
      },
      measures);
  on_ranks(
      noisy(2, 1, 2),
      [&](Engine& engine, Runtime& runtime) {
        engine.load(path());
        uneven_step(engine, runtime, 1);
        EXPECT_EQ(engine.step().noise.scale, through->scale) << "another engine";
      },
      measures);
}

TEST_F(GradientNoiseSaving, AveragesBeginAnewAfterARunThatSavedNone) {
  const auto saves = [&](Engine& engine, Runtime& runtime) {
    uneven_step(engine, runtime, 0);
    engine.step();
    engine.save(path(), {.wait = true});
  };
  on_ranks(noisy(2, 1, 2), saves, [](Config&, RuntimeOptions&) {});
  on_ranks(
      noisy(2, 1, 2),
      [&](Engine& engine, Runtime& runtime) {
        EXPECT_THAT(engine.load(path()).notes,
                    ElementsAre("saved without averages of the gradient noise: they begin anew"));
        uneven_step(engine, runtime, 1);
        const GradientNoise noise = engine.step().noise;
        EXPECT_EQ(noise.scale, averaged({noise}));
      },
      measures);
}

TEST(GradientNoise, IsPlannedWithItsExchange) {
  for (const bool on : {false, true}) {
    std::vector<TierAccount> accounts;
    std::vector<std::string> traffic;
    const auto train = [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < 2; ++step) {
        whole_step(engine, runtime, step);
        engine.step();
      }
      if (runtime.rank() != 0) return;
      accounts.push_back(runtime.ledger().account(Tier::device));
      traffic.push_back(engine.traffic_report());
    };
    const auto adjust = [&](Config& config, RuntimeOptions& options) {
      if (on) measures(config, options);
    };
    const OddRun run = noisy(2, 2, 2);
    on_ranks(run, train, adjust);
    Config config = odd_config(run);
    RuntimeOptions options = RuntimeOptions::from(config);
    adjust(config, options);
    options.device = DeviceKind::meta;
    Runtime runtime(options,
                    [](const CommunicatorOptions& of) { return make_meta_communicator(0, 2, 2, of); });
    Engine engine(runtime, odd_model(), config);
    train(engine, runtime);
    ASSERT_EQ(accounts.size(), 2u);
    EXPECT_EQ(accounts[0].peak, accounts[1].peak);
    EXPECT_EQ(accounts[0].persistent.bytes, accounts[1].persistent.bytes);
    EXPECT_EQ(traffic[0], traffic[1]);
  }
}

TEST(GradientNoise, ChangesNoBitOfTheWeights) {
  for (int stage = 0; stage <= 3; ++stage) {
    kernels::Digest digests[2];
    for (const bool on : {false, true}) {
      on_ranks(
          noisy(3, stage, 2),
          [&](Engine& engine, Runtime& runtime) {
            for (int step = 0; step < 2; ++step) {
              uneven_step(engine, runtime, step);
              EXPECT_EQ(engine.step().noise.measured, on);
            }
            const kernels::Digest mine = engine.state_digest();
            if (runtime.rank() == 0) digests[on] = mine;
          },
          [&](Config& config, RuntimeOptions& options) {
            if (on) measures(config, options);
          });
    }
    EXPECT_EQ(digests[0], digests[1]) << "stage " << stage;
  }
}

TEST(GradientNoise, IsRefusedWhereAStepHasOneGradient) {
  const auto refusal = [](OddRun run, double smoothing = 0.5) {
    return message_of<ConfigurationError>([&] {
      on_ranks(
          run, [](Engine&, Runtime&) {},
          [&](Config& config, RuntimeOptions& options) {
            measures(config, options);
            config.gradient_noise_smoothing = smoothing;
          });
    });
  };
  const std::string one =
      "tranche.gradient_noise_scale: needs at least two gradients a step, but the step has one "
      "micro-batch; give gradient_accumulation_steps 2 and tranche.reduction micro_batch, or more ranks";
  EXPECT_THAT(refusal(noisy(1, 0, 1)), ::testing::HasSubstr(one));
  OddRun invariant = noisy(2, 1, 1);
  invariant.micro_batches = 1;
  EXPECT_THAT(refusal(invariant), ::testing::HasSubstr(one));
  OddRun together = noisy(1, 0, 2);
  together.policy = ReductionPolicy::automatic;
  EXPECT_THAT(refusal(together),
              ::testing::HasSubstr(
                  "tranche.gradient_noise_scale: needs at least two gradients a step, but one rank adds its "
                  "2 micro-batches up before they are reduced; write tranche.reduction micro_batch"));
  for (const double smoothing : {-0.1, 1.0}) {
    EXPECT_THAT(
        refusal(noisy(2, 0, 1), smoothing),
        ::testing::HasSubstr("tranche.gradient_noise_smoothing: " +
                             std::string(smoothing < 0 ? "-0.1" : "1") + " is not at least 0 and below 1"));
  }
  on_ranks(
      noisy(1, 0, 2),
      [](Engine& engine, Runtime&) {
        EXPECT_EQ(message_of<InvalidArgument>([&] { engine.set_batch(3, 1); }),
                  "set_batch() to 1 x 3 samples a step on one rank: tranche.gradient_noise_scale needs at "
                  "least two micro-batches");
      },
      measures);
}

}  // namespace
}  // namespace tranche::test
