// The laws of memory for drawn GPTs and configurations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "memory_checks.h"
#include "models/language_head.h"
#include "partition/flat_layout.h"
#include "tests/core/rounds.h"
#include "tests/core/sweep.h"

namespace tranche::models {
namespace {

/// A GPT whose step is quick; everything else is drawn.
MemoryCase tiny_case(std::uint64_t index) {
  Draw draw(31, index);
  MemoryCase drawn;
  GptConfig& model = drawn.model;
  model.layers = 1 + draw.below(5);
  model.heads = 1 + draw.below(4);
  model.width = model.heads * (4 + draw.below(9));
  model.inner = draw.flip() ? 0 : 1 + draw.below(90);
  // Occasionally there are several blocks of the head.
  model.vocabulary =
      draw.below(8) == 0 ? head_block_columns + 1 + draw.below(3 * head_block_columns) : 2 + draw.below(300);
  model.positions = 1 + draw.below(24);
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = draw.flip() ? 0.1f : 0.0f;
  drawn.sequence = 1 + draw.below(model.positions);
  draw_configuration(draw, {"transformer.wpe.weight", "*.ln_2.bias", "transformer.h.0.attn.*"}, drawn);
  return drawn;
}

TEST(GptMemory, PlansHoldToTheByte) {
  const test::Sweep cases = test::sweep({0, 60});
  test::AxesMet axes;
  for (std::uint64_t index = cases.first; index < cases.end(); ++index) {
    const MemoryCase drawn = tiny_case(index);
    axes.meet("ranks", drawn.ranks);
    axes.meet("stage", drawn.config.stage);
    axes.meet("reduction", drawn.config.reduction);
    axes.meet("compute", drawn.config.precision.compute);
    axes.meet("wire", drawn.config.precision.communication);
    axes.meet("accumulation", drawn.config.precision.accumulation);
    axes.meet("moments", drawn.config.precision.moments);
    axes.meet("depth", drawn.config.depth);
    axes.meet("optimizer", drawn.config.optimizer.type);
    axes.meet("checkpointing", drawn.config.activation_checkpointing);
    axes.meet("frozen", !drawn.config.frozen.empty());
    axes.meet("offloaded optimizer", drawn.config.offload.optimizer);
    axes.meet("offloaded parameters", drawn.config.offload.parameters);
    axes.meet("offloaded activations", drawn.config.offload.activations);
  }
  axes.expect("ranks", {1, 2, 3, 4, 5, 6, 7, 8});
  axes.expect("stage", {0, 1, 2, 3});
  axes.expect("reduction",
              {ReductionPolicy::automatic, ReductionPolicy::boundary, ReductionPolicy::micro_batch});
  for (const char* axis : {"compute", "wire"}) {
    axes.expect(axis, {DataType::float32, DataType::bfloat16, DataType::float16});
  }
  axes.expect("accumulation", {DataType::float32, DataType::bfloat16});
  axes.expect("moments", {DataType::float32, DataType::bfloat16, DataType::block8});
  axes.expect("depth", {1, 2, 3, 4});
  axes.expect<std::string>("optimizer", {"AdamW", "SGD"});
  for (const char* axis : {"checkpointing", "frozen", "offloaded activations"}) {
    axes.expect(axis, {false, true});
  }
  for (const char* axis : {"offloaded optimizer", "offloaded parameters"}) {
    axes.expect(axis, {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme});
  }
  expect_plans_hold(tiny_case, cases);
}

TEST(GptMemorySlow, PlansHoldToTheByteOverMany) {
  expect_plans_hold(tiny_case, test::sweep({60, 400}));
}

/// A GPT of realistic size, only on meta.
MemoryCase sized_case(std::uint64_t index) {
  Draw draw(32, index);
  MemoryCase drawn;
  GptConfig& model = drawn.model;
  model.layers = 1 + draw.below(draw.below(6) == 0 ? 48 : 16);
  model.width = 64 * (1 + draw.below(draw.flip() ? 25 : 6));
  model.heads = model.width / 64;
  model.vocabulary = draw.of<std::int64_t>({256, 5000, 32000, 50257});
  model.positions = 1024;
  drawn.sequence = draw.of<std::int64_t>({64, 200, 256, 512, 1024});
  drawn.ranks = draw.of({1, 2, 3, 4, 8, 16, 64});
  Config& config = drawn.config;
  config.micro_batch_size = 1 + draw.below(6);
  config.accumulation_steps = 1 + draw.below(2);
  config.stage = static_cast<int>(draw.below(4));
  config.depth = 1 + static_cast<int>(draw.below(4));
  config.precision.compute = draw.of({DataType::float32, DataType::bfloat16, DataType::bfloat16});
  config.precision.communication = config.precision.compute;
  config.precision.accumulation = draw.of({DataType::float32, DataType::float32, DataType::bfloat16});
  config.activation_checkpointing = draw.flip();
  config.checkpoint_every = 1 + static_cast<int>(draw.below(5));
  config.vocabulary_chunk = draw.of<std::int64_t>({0, 4096, 8192, 16384});
  return drawn;
}

double packing_ratio(const MemoryRun& run) {
  return run.step.live_peak == 0
             ? 1
             : static_cast<double>(run.step.block) / static_cast<double>(run.step.live_peak);
}

void expect_packed(const test::Sweep& cases) {
  double worst = 1;
  const std::vector<std::uint64_t> taken = test::rounds(cases);
  for (const std::uint64_t index : taken) {
    const MemoryCase drawn = sized_case(index);
    const MemoryRun run = plan_case(drawn, 2);
    EXPECT_LE(packing_ratio(run), 1.02) << "sized_case(" << index << "): " << drawn.to_string();
    worst = std::max(worst, packing_ratio(run));
  }
  std::printf("measured: the block of a step is at most %.4f of its live peak over %d drawn steps\n", worst,
              static_cast<int>(taken.size()));
}

TEST(GptMemory, StepsArePackedWithinTwoPercent) {
  expect_packed(test::sweep({0, 100}));
}

TEST(GptMemorySlow, StepsArePackedWithinTwoPercentOverMany) {
  expect_packed(test::sweep({100, 1500}));
}

/// Plans the same case at every stage.
std::array<MemoryRun, 4> plan_stages(MemoryCase drawn) {
  std::array<MemoryRun, 4> runs;
  for (int stage = 0; stage < 4; ++stage) {
    drawn.config.stage = stage;
    runs[static_cast<std::size_t>(stage)] = plan_case(drawn);
  }
  return runs;
}

TEST(GptMemory, OneRankHoldsTheSameInEveryStage) {
  for (const int round : test::rounds(60)) {
    const auto index = static_cast<std::uint64_t>(round);
    MemoryCase drawn = index % 2 == 0 ? sized_case(index) : tiny_case(index);
    drawn.ranks = 1;
    drawn.rank = 0;
    SCOPED_TRACE(fmt::format("{}_case({}): {}", index % 2 == 0 ? "sized" : "tiny", index, drawn.to_string()));
    const std::array<MemoryRun, 4> runs = plan_stages(drawn);
    for (const MemoryRun& run : runs) {
      EXPECT_EQ(run.device().peak, runs[0].device().peak);
      // On one rank all stages issue the same steps, so the categories are equal too.
      EXPECT_EQ(run.device().category_peak.bytes, runs[0].device().category_peak.bytes);
    }
    if (::testing::Test::HasFailure()) return;
  }
}

/// The bytes that a stage holds of units beside its shards, in the middle of a pass, computed from the sizes
/// of the units.
std::int64_t units_held(const MemoryCase& drawn, int stage) {
  const ModelSpec spec = Gpt::spec(drawn.model, drawn.sequence);
  Config config = drawn.config;
  config.stage = stage;
  const bool boundary = config.effective_reduction(drawn.ranks) == ReductionPolicy::boundary;
  const bool slots = !boundary || config.precision.accumulation != DataType::float32;
  std::vector<std::int64_t> sizes;
  for (const UnitSpec& unit : spec.units()) {
    std::vector<std::int64_t> elements;
    for (const TensorSpec& tensor : unit.tensors) elements.push_back(tensor.shape.elements());
    sizes.push_back(detail::FlatLayout(elements, drawn.ranks).padded_elements());
  }
  // The embedding's slot stays from the head to the end of backward, together with a block's slot and its
  // rounded copy.
  const std::int64_t wire =
      config.precision.communication == DataType::float32 ? 0 : size_of(config.precision.communication);
  std::int64_t bytes = slots ? sizes[0] * 4 + std::max(sizes[1] * (4 + wire), sizes[0] * wire) : 0;
  if (stage == 3 && drawn.ranks > 1) {
    std::sort(sizes.rbegin(), sizes.rend());
    for (std::size_t i = 0; i < sizes.size() && i < static_cast<std::size_t>(config.depth); ++i) {
      bytes += sizes[i] * size_of(config.precision.compute);
    }
  }
  return bytes;
}

TEST(GptMemory, AHigherStageTakesLessWhenItSavesMoreThanTheUnitsItHolds) {
  int pays = 0, does_not = 0;
  const std::vector<std::uint64_t> taken = test::rounds(test::Sweep{0, 150});
  for (const std::uint64_t index : taken) {
    const MemoryCase drawn = sized_case(index);
    if (drawn.ranks == 1) continue;
    const std::array<MemoryRun, 4> runs = plan_stages(drawn);
    for (int stage = 1; stage < 4; ++stage) {
      const MemoryRun& lower = runs[static_cast<std::size_t>(stage) - 1];
      const MemoryRun& higher = runs[static_cast<std::size_t>(stage)];
      const auto state = [](const MemoryRun& run) {
        return run.state.parameters + run.state.gradients + run.state.optimizer;
      };
      const std::int64_t saved = state(lower) - state(higher);
      EXPECT_GE(saved, 0);
      // The units that the higher stage holds gathered count in full, because the lower stage's peak may be
      // at a moment without them.
      const std::int64_t held = units_held(drawn, stage);
      (higher.device().peak <= lower.device().peak ? pays : does_not) += 1;
      if (saved >= held) {
        EXPECT_LE(higher.device().peak, lower.device().peak)
            << "sized_case(" << index << ") stage " << stage << " saves " << saved << " and holds " << held
            << ": " << drawn.to_string();
      }
      // The higher stage's peak grows at most by the units that it holds, minus the state that it saves.
      EXPECT_LE(higher.device().peak - lower.device().peak, held - saved + higher.step.live_peak / 50)
          << "sized_case(" << index << ") stage " << stage << ": " << drawn.to_string();
    }
  }
  const int drawn = static_cast<int>(taken.size());
  EXPECT_GT(pays, drawn * 2 / 3);
  EXPECT_GT(does_not, drawn / (test::sanitized ? 15 : 8)) << "both sides of the line are drawn";
}

TEST(GptMemory, BucketsTakeNoMemory) {
  // Exchanges go through a staging buffer of fixed size, so nothing is allocated in the size of a bucket,
  // however large or small beside the model.
  for (int stage = 0; stage < 4; ++stage) {
    MemoryCase drawn = sized_case(3);
    drawn.ranks = 4;
    drawn.rank = 3;
    drawn.config.stage = stage;
    const std::int64_t peak = plan_case(drawn).device().peak;
    for (const std::int64_t elements : {std::int64_t{1}, std::int64_t{70'001}, std::int64_t{1} << 40}) {
      drawn.config.reduce_bucket_elements = drawn.config.allgather_bucket_elements = elements;
      EXPECT_EQ(plan_case(drawn).device().peak, peak) << "stage " << stage << ", buckets of " << elements;
    }
  }
}

/// The bytes that a step must hold at its peak (docs/internals/memory-formulas.md): model state without
/// padding, units and activations, but neither workspace nor staging buffer, alignment and packing.
double must_hold(const MemoryCase& drawn) {
  const GptConfig& model = drawn.model;
  const Config& config = drawn.config;
  const double b = size_of(config.precision.compute), g = size_of(config.precision.accumulation),
               n = drawn.ranks;
  const double rows = static_cast<double>(config.micro_batch_size * drawn.sequence);
  const auto w = static_cast<double>(model.width), i = static_cast<double>(model.inner_width());
  const auto v = static_cast<double>(model.vocabulary), layers = static_cast<double>(model.layers);
  const double block = 4 * w * w + 2 * w * i + 9 * w + i;
  const double embedding = (v + static_cast<double>(model.positions) + 2) * w;
  const double parameters = layers * block + embedding;
  const bool boundary = config.effective_reduction(drawn.ranks) == ReductionPolicy::boundary;
  const int stage = drawn.ranks == 1 ? 0 : config.stage;

  const double master = config.precision.compute == DataType::float32 ? 0 : 4;
  const double weights = stage == 3 ? b / n : b, optimizer = (stage == 0 ? 1 : 1 / n) * (master + 8);
  const double state = parameters * (weights + optimizer + (stage == 0 || boundary ? g : g / n));

  const double slot = boundary && g == 4 ? 0 : 4;
  const bool sent_as_is = config.precision.communication == DataType::float32 || drawn.ranks == 1;
  const double wire = sent_as_is ? 0 : size_of(config.precision.communication);
  const double ahead = stage == 3 ? std::min<double>(config.depth, layers) : 0;  // gathered units

  const double stream = rows * w * b;  // one residual
  const double saved = rows * (7 * w + i) * b + rows * 16 + rows * static_cast<double>(model.heads) * 4;
  const bool again = config.activation_checkpointing;
  const double group = again ? std::min<double>(config.checkpoint_every, layers) : 1;
  const double inputs = std::ceil(layers / group);
  const double columns =
      config.vocabulary_chunk > 0
          ? std::min(v, static_cast<double>(round_up(config.vocabulary_chunk, head_block_columns)))
          : v;
  const bool several = model.vocabulary > head_block_columns;
  // During the head's backward, with every block's activations.
  const double at_head = (stage == 3 ? b * (embedding + (ahead - 1) * block) : 0) + slot * embedding +
                         (again ? 0 : layers * saved) + (inputs + 1) * stream + stream + stream + 8 * rows +
                         12 * rows + rows * columns * 4 + stream + (b < 4 && several ? rows * w * 4 : 0) +
                         (b < 4 ? rows * std::min<double>(v, head_block_columns) * b : 0);
  // During the backward of the first block after it, and its reduction.
  const double blocks =
      again ? group * saved + (inputs + group - 1) * stream : layers * saved + layers * stream;
  const double units = b * ahead * block + slot * (embedding + block);
  const double at_block = units + blocks + stream + rows * (w + 2 * i) * b;
  const double at_reduction = units + wire * block + blocks + stream;
  // At the end of backward.
  const double at_end = slot * embedding + wire * embedding + stream;
  return state + std::max({at_head, at_block, at_reduction, at_end});
}

/// The largest case that fits the budget according to plans: first in steps of 16 of the width, then of the
/// inner width.
MemoryCase largest_within(MemoryCase drawn, std::int64_t budget) {
  const auto fits = [&](const MemoryCase& tried) { return plan_case(tried).device().peak <= budget; };
  const auto grow = [&](std::int64_t GptConfig::*field, std::int64_t low, std::int64_t high) {
    // `low` fits, `high` does not.
    while (high - low > 16) {
      const std::int64_t middle = low + round_up((high - low) / 2, 16);
      if (middle == high) break;
      drawn.model.*field = middle;
      (fits(drawn) ? low : high) = middle;
    }
    drawn.model.*field = low;
  };
  grow(&GptConfig::width, 16, 4096);
  grow(&GptConfig::inner, drawn.model.inner_width(), 16 * drawn.model.width);
  return drawn;
}

TEST(GptMemory, TheLargestModelFillsItsBudget) {
  constexpr std::int64_t budget = std::int64_t{512} << 20;
  struct Setting {
    int ranks, stage;
    std::int64_t layers, vocabulary, sequence, micro_batch;
    int checkpoint_every;  ///< 0: off
    std::int64_t chunk;
    DataType dtype;
  };
  for (const Setting& setting : {Setting{1, 0, 8, 8192, 256, 2, 0, 0, DataType::bfloat16},
                                 Setting{1, 0, 12, 50257, 128, 1, 1, 8192, DataType::float32},
                                 Setting{4, 1, 12, 8192, 512, 1, 0, 0, DataType::bfloat16},
                                 Setting{4, 2, 12, 8192, 512, 4, 2, 4096, DataType::bfloat16},
                                 Setting{8, 3, 16, 32000, 512, 2, 1, 8192, DataType::bfloat16},
                                 Setting{8, 3, 24, 8192, 256, 1, 0, 0, DataType::bfloat16}}) {
    MemoryCase drawn;
    drawn.model.heads = 8;
    drawn.model.layers = setting.layers;
    drawn.model.vocabulary = setting.vocabulary;
    drawn.model.positions = drawn.sequence = setting.sequence;
    drawn.ranks = setting.ranks;
    drawn.config.stage = setting.stage;
    drawn.config.micro_batch_size = setting.micro_batch;
    drawn.config.activation_checkpointing = setting.checkpoint_every > 0;
    drawn.config.checkpoint_every = std::max(setting.checkpoint_every, 1);
    drawn.config.vocabulary_chunk = setting.chunk;
    drawn.config.precision.compute = drawn.config.precision.communication = setting.dtype;
    drawn = largest_within(drawn, budget);
    const double fill = must_hold(drawn) / static_cast<double>(budget);
    const MemoryRun run = plan_case(drawn);
    std::printf(
        "measured: %d x stage %d, %s, %.1f million parameters in 512 MiB: peak %.4f, must hold %.4f of it\n",
        setting.ranks, setting.stage, std::string(name_of(setting.dtype)).c_str(),
        static_cast<double>(drawn.model.parameters()) / 1e6,
        static_cast<double>(run.device().peak) / static_cast<double>(budget), fill);
    EXPECT_GE(fill, 0.95) << drawn.to_string() << "\n" << run.summary;
    EXPECT_LE(fill, 1.0) << "the formula counts what need not be there: " << drawn.to_string();
  }
}

TEST(GptMemorySlow, TheLargestModelTrainsWithinItsBudget) {
  constexpr std::int64_t budget = std::int64_t{512} << 20;
  MemoryCase drawn;
  drawn.model.heads = 8;
  drawn.model.layers = 12;
  drawn.model.vocabulary = 8192;
  drawn.model.positions = drawn.sequence = 32;
  drawn.ranks = 4;
  drawn.config.stage = 3;
  drawn.config.threads = 1;
  drawn.config.communication_timeout = 300;
  drawn = largest_within(drawn, budget);
  EXPECT_GE(must_hold(drawn) / static_cast<double>(budget), 0.95);
  drawn.config.device_memory_limit = budget;
  const std::vector<MemoryRun> runs = measure_case(drawn);
  EXPECT_EQ(runs[0].device().peak, plan_case(drawn).device().peak);
  // With sixteen more elements of the inner width it is refused.
  drawn.model.inner = drawn.model.inner_width() + 16;
  EXPECT_THROW(measure_case(drawn), OutOfMemory);
}

}  // namespace
}  // namespace tranche::models
