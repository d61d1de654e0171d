// The axis `tensor` with shards, ZeRO stages and reduction policies: losses and norms near those of one rank
// in fp32, and in bf16 as near to it as bf16 is to fp32; one digest for each size.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tensor_models.h"
#include "tests/core/rounds.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

constexpr int steps = test::fewer(20);

/// A point of the sweep.
struct Point {
  int tensor = 1, shards = 1, stage = 0;
  ReductionPolicy policy = ReductionPolicy::boundary;
  bool lora = false;
  std::uint64_t seed = 1234;  ///< seed of initial weights and masks
  std::string text() const {
    return "tensor=" + std::to_string(tensor) + ", shard=" + std::to_string(shards) + ", stage " +
           std::to_string(stage) + ", " + std::string(name_of(policy)) + (lora ? ", adapters" : "");
  }
};

/// Twelve samples a step in four micro-batches, which one or two data ranks share.
Config config_at(const Point& point, DataType dtype) {
  Config config = config_of(1);
  config.train_batch_size = 12;
  config.micro_batch_size = 3;
  config.accumulation_steps = 4 / point.shards;
  config.stage = point.stage;
  config.seed = point.seed;
  config.reduction = point.policy;
  config.mesh = "shard=" + std::to_string(point.shards) + ",tensor=" + std::to_string(point.tensor);
  config.precision.compute = config.precision.communication = dtype;
  if (point.lora) {
    config.lora = {.rank = 3, .alpha = 7, .dropout = 0.1, .targets = {"all-linear", "lm_head"}};
    config.optimizer.learning_rate = 1e-2;
  }
  return config;
}

GptRun run_at(const LanguageModel& model, const Point& point, DataType dtype) {
  return train_model(point.tensor * point.shards, model, config_at(point, dtype), steps, time_steps, true);
}

struct Furthest {
  double loss = 0, norm = 0;
};

/// Trains at every stage, number of shards and reduction policy for each size of the axis `tensor`. With
/// `every` all of these are trained, otherwise a part that differs by size.
Furthest sweep(const LanguageModel& model, std::initializer_list<int> sizes, bool every, bool lora = false) {
  const GptRun one = run_at(model, {.lora = lora}, DataType::float32);
  EXPECT_LT(one.losses.back(), one.losses.front()) << "it learns";
  Furthest furthest;
  int number = 0, compared = 0;
  for (const int tensor : sizes) {
    std::map<std::pair<int, ReductionPolicy>, kernels::Digest> digests;
    for (const int shards : {1, 2}) {
      for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
        for (int stage = 0; stage <= 3; ++stage) {
          const int point_number = number++;
          // A selection; stages 0 and 3 have one policy and number of shards for each size.
          const bool drawn = stage % 3 == 0 && shards == 1 + tensor % 2 &&
                             (policy == ReductionPolicy::micro_batch) == (point_number % 32 < 16);
          if (!every && !drawn) continue;
          if (every && !test::swept(point_number, 5)) continue;
          if (test::sanitized && tensor > *sizes.begin()) continue;
          const Point point{tensor, shards, stage, policy, lora};
          SCOPED_TRACE(model.describe() + " " + point.text());
          const GptRun cut = run_at(model, point, DataType::float32);
          const double loss = largest_relative_difference(cut.losses, one.losses);
          const double norm = largest_relative_difference(cut.norms, one.norms);
          EXPECT_LE(loss, 1e-5);
          EXPECT_LE(norm, 1e-5);
          furthest = {std::max(furthest.loss, loss), std::max(furthest.norm, norm)};
          const auto [of_others, first] = digests.try_emplace({shards, policy}, cut.digest);
          if (first) continue;
          EXPECT_EQ(cut.digest, of_others->second) << "stages have equal bits";
          ++compared;
        }
      }
    }
  }
  if (!every) {
    EXPECT_GT(compared, 0) << "digests of stages were compared";
  }
  std::printf("measured: %s%s: losses within %.1e, norms within %.1e of one rank's\n",
              model.describe().c_str(), lora ? " with adapters" : "", furthest.loss, furthest.norm);
  return furthest;
}

Gpt gpt() {
  return Gpt(with_dropout(six_heads()));
}

/// bf16 losses on the axis against one rank's. The bar of a row is the largest difference of one rank's bf16
/// losses from its fp32 losses.
struct Bf16Rows {
  int rows = 0;
  double squares = 0, squares_of_bar = 0;  ///< sums of squared differences over all rows and steps

  void add(const Bf16Rows& other) {
    rows += other.rows;
    squares += other.squares;
    squares_of_bar += other.squares_of_bar;
  }
  /// Expects that the root mean square of the differences is at most that of the bar's differences.
  void expect_root_mean_square(const std::string& what) const {
    const auto root = [&](double sum) { return std::sqrt(sum / (rows * steps)); };
    EXPECT_GT(squares, 0) << "another order of sums has other bits";
    EXPECT_LE(root(squares), root(squares_of_bar)) << what;
    std::printf(
        "measured: %s, bf16, %d rows: root mean square %.2e from one rank's bf16, which is %.2e from its "
        "fp32\n",
        what.c_str(), rows, root(squares), root(squares_of_bar));
  }
};

double squared_relative_differences(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double sum = 0;
  for (std::size_t i = 0; i < b.size() && i < a.size(); ++i) sum += std::pow((a[i] - b[i]) / b[i], 2);
  return sum;
}

Bf16Rows compare_in_bf16(const LanguageModel& model, std::initializer_list<int> sizes, int starts) {
  Bf16Rows compared;
  for (int start = 0; start < starts; ++start) {
    const std::uint64_t seed = 1234 + static_cast<std::uint64_t>(start);
    const GptRun wide = run_at(model, {.seed = seed}, DataType::float32),
                 one = run_at(model, {.seed = seed}, DataType::bfloat16);
    const double bar = largest_relative_difference(one.losses, wide.losses);
    for (const int tensor : sizes) {
      for (const int shards : {1, 2}) {
        const Point point{.tensor = tensor, .shards = shards, .seed = seed};
        const GptRun cut = run_at(model, point, DataType::bfloat16);
        const double difference = largest_relative_difference(cut.losses, one.losses);
        EXPECT_LE(difference, bar) << model.describe() << " tensor=" << tensor << ", shard=" << shards;
        ++compared.rows;
        compared.squares += squared_relative_differences(cut.losses, one.losses);
        compared.squares_of_bar += squared_relative_differences(one.losses, wide.losses);
        std::printf(
            "measured: %s, bf16, tensor=%d, shard=%d, start %d: losses within %.2e of one rank's, which are "
            "within %.2e of fp32's\n",
            model.describe().c_str(), tensor, shards, start, difference, bar);
      }
    }
  }
  compared.expect_root_mean_square(model.describe());
  return compared;
}

TEST(TensorSweep, LossesAndNormsAreThoseOfOneRank) {
  sweep(gpt(), {2, 3}, false);
  sweep(Llama(eight_heads(LlamaKind::llama)), {2, 4, 8}, false);
}

TEST(TensorSweep, AdaptersWithDropoutHaveTheLossesOfOneRank) {
  sweep(gpt(), {2, 3}, false, true);
  sweep(Llama(eight_heads(LlamaKind::llama)), {4}, false, true);
}

/// The greatest difference between the weights of two runs.
double furthest_weight(const GptRun& run, const GptRun& other) {
  double furthest = 0;
  for (const auto& [name, values] : other.weights) {
    const std::vector<double>& own = run.weights.at(name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      furthest = std::max(furthest, std::abs(own[i] - values[i]));
    }
  }
  return furthest;
}

// Muon on matrices whose columns or rows the axis cuts: one rank receives all parts of a matrix. Messages are
// fp32 in fp32 training. In bf16 a difference in the last bit of a gradient could change an element of the
// update by a unit of bf16.
TEST(TensorSweep, MuonHasTheWeightsOfOneRank) {
  constexpr int few_steps = 5;
  GptConfig four_heads = tiny_gpt();
  four_heads.heads = 4;
  const Gpt small(four_heads);
  const Llama llama(eight_heads(LlamaKind::qwen3));
  for (const LanguageModel* model :
       {static_cast<const LanguageModel*>(&small), static_cast<const LanguageModel*>(&llama)}) {
    const auto run = [&](const Point& point) {
      Config config = config_at(point, DataType::float32);
      config.optimizer.type = "Muon";
      config.optimizer.learning_rate = 1e-3;
      return train_model(point.tensor * point.shards, *model, config, few_steps, time_steps, true);
    };
    const GptRun one = run({});
    const double of_shards = furthest_weight(run({.shards = 2}), one);
    double furthest = 0;
    int number = 0;
    for (const int tensor : {2, 4}) {
      for (int stage = 0; stage <= 3; ++stage) {
        if (!test::swept(number++, 3)) continue;
        const Point point{tensor, 1 + stage % 2, stage};
        const double difference = furthest_weight(run(point), one);
        EXPECT_LE(difference, 1e-5) << model->describe() << " " << point.text();
        furthest = std::max(furthest, difference);
      }
    }
    std::printf(
        "measured: %s, Muon: weights within %.1e of one rank's after %d steps, within %.1e by two shards\n",
        model->describe().c_str(), furthest, few_steps, of_shards);
  }
}

TEST(TensorSweep, Bf16IsAsNearAsBf16ToFp32) {
  compare_in_bf16(gpt(), {3}, 1);
}

TEST(TensorSweepSlow, EveryLayoutHasTheLossesAndNormsOfOneRank) {
  sweep(gpt(), {2, 3}, true);
  sweep(Llama(eight_heads(LlamaKind::llama)), {2, 4, 8}, true);
}

TEST(TensorSweepSlow, EveryLayoutWithAdaptersToo) {
  sweep(gpt(), {2, 3}, true, true);
  sweep(Llama(eight_heads(LlamaKind::llama)), {2, 4, 8}, true, true);
}

// Two rows of the GPT on tensor=2 are above the bar, and this test fails for them: docs/results/current.md.
TEST(TensorSweepSlow, Bf16IsAsNearAsBf16ToFp32) {
  Bf16Rows all = compare_in_bf16(gpt(), {2, 3}, 4);
  for (const LlamaKind kind : all_kinds) all.add(compare_in_bf16(Llama(eight_heads(kind)), {2, 4, 8}, 4));
  all.expect_root_mean_square("all models");
}

}  // namespace
}  // namespace tranche::models
