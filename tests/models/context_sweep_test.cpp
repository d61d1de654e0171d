// The axis `context` together with all others, at every ZeRO stage: losses near those of one rank in fp32,
// with dropout and four documents per row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "context_models.h"
#include "tests/core/rounds.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

/// A mesh in powers of two, and the other settings of a training.
struct Point {
  int replicas = 1, stages = 1, shards = 1, context = 1, parts = 1;
  int zero = 0;
  ContextExchange exchange = ContextExchange::gather;
  int ranks() const { return replicas * stages * shards * context * parts; }
  std::string mesh() const {
    const auto axis = [](const char* name, int size) { return name + std::to_string(size); };
    return axis("replicate=", replicas) + axis(", pipeline=", stages) + axis(", shard=", shards) +
           axis(", context=", context) + axis(", tensor=", parts);
  }
};

/// All meshes of `ranks` ranks with the axis context, at each ZeRO stage.
std::vector<Point> points_of(int ranks, int most_parts) {
  std::vector<Point> points;
  for (int replicas = 1; replicas <= ranks; replicas *= 2) {
    for (int stages = 1; stages <= ranks; stages *= 2) {
      for (int shards = 1; shards <= ranks; shards *= 2) {
        for (int parts = 1; parts <= most_parts; parts *= 2) {
          for (int context = 2; context <= ranks; context *= 2) {
            Point point{replicas, stages, shards, context, parts};
            if (point.ranks() != ranks || stages > 4 || replicas * shards > 4) continue;
            for (point.zero = 0; point.zero <= 3; ++point.zero) {
              point.exchange = ContextExchange::gather;
              points.push_back(point);
              if (context > 2 || parts > 1) continue;  // there are too few heads
              point.exchange = ContextExchange::ulysses;
              points.push_back(point);
            }
          }
        }
      }
    }
  }
  return points;
}

/// Eight samples a step in four micro-batches, which data ranks share.
Config config_at(const Point& point) {
  Config config = config_of(1);
  config.train_batch_size = 8;
  config.micro_batch_size = 2;
  config.accumulation_steps = 4 / (point.replicas * point.shards);
  config.stage = point.zero;
  if (point.ranks() > 1) config.mesh = point.mesh();
  config.activation_checkpointing = point.zero % 2 == 1;
  if (point.ranks() > 1) config.context_exchange = point.exchange;
  return config;
}

void sweep(const LanguageModel& model, const ContextRun& run, int most_parts, bool every) {
  const std::vector<double> one = losses_of(1, model, config_at({}), run);
  ASSERT_LT(one[static_cast<std::size_t>(run.steps) - 1], one.front()) << "it learns";
  std::vector<Point> points;
  for (const int ranks : {2, 4, 8}) {
    const std::vector<Point> more = points_of(ranks, most_parts);
    points.insert(points.end(), more.begin(), more.end());
  }
  double furthest = 0;
  int taken = 0;
  for (std::size_t number = 0; number < points.size(); ++number) {
    const Point& point = points[number];
    // A selection with every number of ranks and every ZeRO stage.
    if (!every && number % 13 != 5) continue;
    if (every && !test::swept(static_cast<int>(number), 4)) continue;
    if (test::sanitized && point.ranks() > 4) continue;
    SCOPED_TRACE(model.describe() + " on " + point.mesh() + " at stage " + std::to_string(point.zero) + ", " +
                 std::string(name_of(point.exchange)));
    const double difference =
        largest_relative_difference(losses_of(point.ranks(), model, config_at(point), run), one);
    EXPECT_LE(difference, 1e-5);
    furthest = std::max(furthest, difference);
    ++taken;
  }
  std::printf("measured: %s: losses of %d of %zu meshes within %.1e of one rank's\n",
              model.describe().c_str(), taken, points.size(), furthest);
}

constexpr int steps = test::fewer(20);

void sweep_both(bool every) {
  sweep(Gpt(with_dropout(six_heads())), {.time = 16, .steps = steps}, 2, every);
  sweep(Llama(eight_heads(LlamaKind::llama)), {.time = 32, .steps = steps, .documents = true}, 8, every);
}

TEST(ContextSweep, LossesAreThoseOfOneRank) {
  sweep_both(false);
}

TEST(ContextSweepSlow, EveryMeshHasTheLossesOfOneRank) {
  sweep_both(true);
}

}  // namespace
}  // namespace tranche::models
