// Block inputs in host memory: equal bits, exactly the necessary bytes, and device memory that does not grow
// with depth.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "memory_draw.h"

namespace tranche::models {
namespace {

constexpr std::int64_t time = 12;

Config recomputing(std::int64_t batch, int ranks, DataType dtype) {
  Config config = plain_config(batch, ranks);
  config.precision.compute = config.precision.communication = dtype;
  config.activation_checkpointing = true;
  return config;
}

struct Case {
  DataType dtype;
  int stage, ranks, every;
  bool overlap;
};

class GptOffload : public ::testing::TestWithParam<Case> {};

TEST_P(GptOffload, GivesTheSameBits) {
  const Case& c = GetParam();
  GptConfig model = tiny_gpt();
  model.layers = 5;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1f;
  const int accumulate = 2;
  Config config = recomputing(2 * c.ranks * accumulate, c.ranks, c.dtype);
  config.micro_batch_size = 2;
  config.accumulation_steps = accumulate;
  config.stage = c.stage;
  config.checkpoint_every = c.every;
  config.overlap = c.overlap;
  const GptRun plain = train_gpt(c.ranks, model, config, 4, time, true, DeviceKind::cpu, nullptr, true);
  config.offload.activations = true;
  config.debug.poison_memory = true;
  const GptRun away = train_gpt(c.ranks, model, config, 4, time, true, DeviceKind::cpu, nullptr, true);
  EXPECT_EQ(plain.losses, away.losses);
  EXPECT_EQ(plain.norms, away.norms);
  EXPECT_EQ(plain.gradients, away.gradients);
  EXPECT_EQ(plain.weights, away.weights);
  EXPECT_TRUE(plain.digest == away.digest);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GptOffload,
    ::testing::Values(Case{DataType::float32, 0, 1, 1, true}, Case{DataType::float32, 3, 2, 2, true},
                      Case{DataType::float32, 0, 3, 2, false}, Case{DataType::float32, 3, 3, 1, false},
                      Case{DataType::bfloat16, 0, 2, 3, true}, Case{DataType::bfloat16, 3, 1, 2, false},
                      Case{DataType::bfloat16, 3, 2, 1, true}, Case{DataType::bfloat16, 3, 3, 5, true},
                      Case{DataType::bfloat16, 0, 1, 9, true}));

// Refused beside offloaded optimizer state alone (Config.UpdatesBeforeTheNormNeedNothingOfIt).
TEST(GptEarlyUpdates, TrainBesideInputsInHostMemory) {
  for (const int stage : {0, 3}) {
    Config config = recomputing(4, 2, DataType::bfloat16);
    config.stage = stage;
    config.gradient_clipping = 0;
    config.offload.activations = true;
    const GptRun expected = train_gpt(2, tiny_gpt(), config, 4, time);
    config.update = UpdateTime::as_reduced;
    const GptRun early = train_gpt(2, tiny_gpt(), config, 4, time);
    EXPECT_EQ(early.losses, expected.losses);
    EXPECT_NE(early.losses.back(), early.losses.front());
    EXPECT_TRUE(early.digest == expected.digest) << stage;
  }
}

/// The bytes of one block input.
std::int64_t input_bytes(const MemoryCase& run) {
  return run.config.micro_batch_size * run.sequence * run.model.width * size_of(run.config.precision.compute);
}

MemoryCase deep_case(std::int64_t layers, int every, int ranks, int stage) {
  MemoryCase run;
  run.model = tiny_gpt();
  run.model.layers = layers;
  run.model.width = 32;  // one input is a multiple of 256 bytes
  run.model.heads = 2;
  run.sequence = 16;
  run.ranks = ranks;
  run.config = recomputing(2 * ranks, ranks, DataType::bfloat16);
  run.config.micro_batch_size = 2;
  run.config.stage = stage;
  run.config.checkpoint_every = every;
  run.config.offload.activations = true;
  return run;
}

TEST(GptOffloadMemory, OfTheDeviceDoesNotGrowWithDepth) {
  for (const auto& [ranks, stage] : {std::pair(1, 0), std::pair(2, 3)}) {
    for (const int every : {1, 2}) {
      std::set<std::int64_t> device, step, on_device;
      for (const std::int64_t layers : {6, 12, 24}) {
        MemoryCase run = deep_case(layers, every, ranks, stage);
        const MemoryRun planned = plan_case(run);
        const MemoryRun measured = measure_case(run)[0];
        for (std::size_t tier = 0; tier < tier_count; ++tier) {
          EXPECT_EQ(planned.tiers[tier].peak, measured.tiers[tier].peak);
          EXPECT_EQ(planned.tiers[tier].category_peak.bytes, measured.tiers[tier].category_peak.bytes);
          EXPECT_EQ(planned.tiers[tier].at_peak.bytes, measured.tiers[tier].at_peak.bytes);
        }
        device.insert(measured.device().category_peak[Category::activations]);
        step.insert(measured.step.live_peak);
        const TierAccount& host = measured.tiers[static_cast<std::size_t>(Tier::host)];
        EXPECT_EQ(host.category_peak[Category::activations], layers / every * input_bytes(run));
        run.config.offload.activations = false;
        on_device.insert(plan_case(run).device().category_peak[Category::activations]);
      }
      EXPECT_EQ(device.size(), 1u) << ::testing::PrintToString(device);
      EXPECT_EQ(step.size(), 1u) << ::testing::PrintToString(step);
      EXPECT_EQ(on_device.size(), 3u) << "the test can fail: inputs that stay do grow with depth";
      EXPECT_LT(*device.begin(), *on_device.begin());
    }
  }
}

TEST(GptOffloadMemory, NothingIsAllocatedOnceTheStepIsPlanned) {
  const MemoryCase run = deep_case(6, 2, 1, 0);
  on_ranks(1, Gpt::spec(run.model, run.sequence), run.config, [&](Engine& engine) {
    run_case(run, engine, 2, 0);
    const std::int64_t device = engine.runtime().memory_calls(Tier::device);
    const std::int64_t host = engine.runtime().memory_calls(Tier::host);
    EXPECT_GT(host, 0);
    run_case(run, engine, 3, 0);
    EXPECT_EQ(engine.runtime().memory_calls(Tier::device), device);
    EXPECT_EQ(engine.runtime().memory_calls(Tier::host), host);
  });
}

TEST(GptOffloadTraffic, IsEveryKeptInputOnceEachWay) {
  for (const DeviceKind kind : {DeviceKind::cpu, DeviceKind::meta}) {
    for (const int every : {1, 2, 4}) {
      MemoryCase run = deep_case(6, every, 1, 0);
      run.config.accumulation_steps = 3;
      run.config.train_batch_size = 6;
      const std::int64_t saved = (6 + every - 1) / every;
      on_ranks(
          1, Gpt::spec(run.model, run.sequence), run.config,
          [&](Engine& engine) {
            const Gpt gpt(run.model);
            TokenData data(run.sequence, run.model.vocabulary, false);
            data.draw(0, 2);
            engine.begin_evaluation();
            gpt.evaluate(engine, data.batch());
            engine.end_evaluation();
            const TierAccount host = engine.runtime().ledger().account(Tier::host);
            EXPECT_EQ(host.category_peak[Category::activations], 0) << "evaluation keeps nothing";
            for (int step = 0; step < 4; ++step) {
              for (int m = 0; m < 3; ++m) gpt.forward_backward(engine, data.batch());
              const StepResult result = engine.step();
              EXPECT_EQ(result.offload_traffic.to_host, 3 * saved * input_bytes(run));
              EXPECT_EQ(result.offload_traffic.from_host, 3 * saved * input_bytes(run));
            }
          },
          kind);
    }
  }
}

/// The number of spans of the compute stream that began in the third step while the link was limited to its
/// speed.
int computed_while_copying(bool overlap) {
  MemoryCase run = deep_case(6, 1, 1, 0);
  run.config.overlap = overlap;
  run.config.debug.host_link_bytes_per_second = static_cast<double>(input_bytes(run)) / 20e-3;
  int count = 0;
  run_thread_ranks(1, [&](int, const CommunicatorFactory& factory) {
    Config config = run.config;
    validate_config(config, 1);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.trace = true;
    Runtime runtime(options, factory);
    Engine engine(runtime, Gpt::spec(run.model, run.sequence), config);
    run_case(run, engine, 3, 0);
    const auto trace = nlohmann::json::parse(runtime.trace()->to_json());
    std::map<std::int64_t, std::string> tracks;
    std::vector<std::pair<double, double>> copies;
    std::vector<double> computed;
    for (const auto& event : trace["traceEvents"]) {
      if (event["ph"] == "M" && event["name"] == "thread_name") tracks[event["tid"]] = event["args"]["name"];
    }
    for (const auto& event : trace["traceEvents"]) {
      if (event["ph"] != "X") continue;
      const std::string& track = tracks[event["tid"]];
      const double begin = event["ts"];
      if (track == "from host") copies.emplace_back(begin, begin + event["dur"].get<double>());
      if (track == "compute") computed.push_back(begin);
    }
    std::sort(copies.begin(), copies.end());
    EXPECT_FALSE(computed.empty());
    EXPECT_EQ(copies.size(), 3u * 6 * 2) << "the copy, and being held to the speed";
    for (std::size_t i = 2 * copies.size() / 3; i < copies.size(); ++i) {
      count += static_cast<int>(std::count_if(computed.begin(), computed.end(), [&](double begin) {
        return copies[i].first < begin && begin < copies[i].second;
      }));
    }
  });
  return count;
}

TEST(GptOffloadOverlap, BlocksAreComputedWhileTheInputOfTheNextTravels) {
  // On a busy machine the copying thread may not get a core at that moment, so one observation is enough.
  int seen = 0;
  for (int tries = 0; tries < 20 && seen == 0; ++tries) seen = computed_while_copying(true);
  EXPECT_GT(seen, 0);
  EXPECT_EQ(computed_while_copying(false), 0) << "the test can fail";
}

}  // namespace
}  // namespace tranche::models
