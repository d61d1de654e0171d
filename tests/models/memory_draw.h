#pragma once
/// Draws models and configurations for tests of memory, and measures what a run of them holds and sends, in
/// reality or on the meta device.

#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "training_fixture.h"
#include "tranche/device/ledger.h"
#include "tranche/models/llama.h"

namespace tranche::models {

/// Draws by (law, case, number of the draw), so that a line with law and case reproduces everything.
class Draw {
 public:
  Draw(std::uint64_t law, std::uint64_t index) : key_{law, RandomPurpose::test, index} {}
  /// A number from 0 to n - 1.
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random_bits(key_, count_++) % static_cast<std::uint64_t>(n));
  }
  bool flip() { return below(2) == 1; }
  template <typename T>
  T of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<std::int64_t>(values.size()))];
  }

 private:
  RandomKey key_;
  std::uint64_t count_ = 0;
};

struct MemoryCase {
  GptConfig model;
  std::optional<LlamaConfig> llama = {};  ///< replaces `model`
  std::int64_t sequence = 8;
  int ranks = 1;
  int rank = 0;  ///< the rank that is planned
  Config config;
  std::unique_ptr<const LanguageModel> language_model() const {
    if (llama) return std::make_unique<const Llama>(*llama);
    return std::make_unique<const Gpt>(model);
  }
  std::string to_string() const {
    if (llama) {
      return fmt::format("MemoryCase{{{} sequence {}, rank {} of {}, config {}}}", llama->to_json(), sequence,
                         rank, ranks, config.to_json());
    }
    const auto& m = model;
    return fmt::format(
        "MemoryCase{{layers {}, heads {}, width {}, inner {}, vocabulary {}, positions {}, sequence {}, rank "
        "{} of {}, "
        "config {}}}",
        m.layers, m.heads, m.width, m.inner_width(), m.vocabulary, m.positions, sequence, rank, ranks,
        config.to_json());
  }
};

/// The bytes that one rank of a run holds and sends.
struct MemoryRun {
  std::array<TierAccount, tier_count> tiers;
  std::string traffic;
  Engine::StepMemory step;
  Engine::StateBytes state;
  std::string summary;
  const TierAccount& device() const { return tiers[static_cast<std::size_t>(Tier::device)]; }
};

/// Runs `steps` steps, the last of which uses packed memory, then `evaluations` micro-batches of validation
/// and another step.
inline void run_case(const MemoryCase& drawn, Engine& engine, int steps, int evaluations) {
  const auto model = drawn.language_model();
  const Config& config = engine.config();
  TokenData data(drawn.sequence, model->shape().vocabulary, false);
  const bool meta = engine.device().kind() == DeviceKind::meta;
  std::vector<std::int64_t> samples(static_cast<std::size_t>(config.micro_batch_size), 0);
  const Shape shape{config.micro_batch_size, drawn.sequence};
  const auto batch = [&]() -> TokenBatch {
    if (meta) return {{nullptr, DataType::int32, shape}, {nullptr, DataType::int32, shape}, samples};
    data.draw(engine.runtime().mesh().data_rank(engine.runtime().rank()), config.micro_batch_size);
    return data.batch();
  };
  const auto step = [&] {
    for (std::int64_t m = 0; m < config.accumulation_steps; ++m) model->forward_backward(engine, batch());
    (void)engine.step();
  };
  for (int s = 0; s < steps; ++s) step();
  if (evaluations == 0) return;
  engine.begin_evaluation();
  for (int e = 0; e < evaluations; ++e) model->evaluate(engine, batch());
  (void)engine.end_evaluation();
  step();
}

inline MemoryRun results_of(Engine& engine) {
  MemoryRun run;
  for (const Tier tier : all_tiers) {
    run.tiers[static_cast<std::size_t>(tier)] = engine.runtime().ledger().account(tier);
  }
  run.traffic = engine.traffic_report();
  run.step = engine.step_memory();
  run.state = engine.state_bytes();
  run.summary = engine.summary();
  return run;
}

/// The case's rank on the meta device, without the other ranks.
inline MemoryRun plan_case(const MemoryCase& drawn, int steps = 3, int evaluations = 0) {
  Config config = drawn.config;
  validate_config(config, drawn.ranks);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.device = DeviceKind::meta;
  options.log_level = LogLevel::off;
  Runtime runtime(options, [&](const CommunicatorOptions& o) {
    return make_meta_communicator(drawn.rank, drawn.ranks, drawn.ranks, o);
  });
  Engine engine(runtime, drawn.language_model()->spec(drawn.sequence), config);
  run_case(drawn, engine, steps, evaluations);
  return results_of(engine);
}

/// The same on all ranks, as threads of this process; returns the results by rank.
inline std::vector<MemoryRun> measure_case(const MemoryCase& drawn, int steps = 3, int evaluations = 0) {
  std::vector<MemoryRun> runs(static_cast<std::size_t>(drawn.ranks));
  on_ranks(drawn.ranks, drawn.language_model()->spec(drawn.sequence), drawn.config, [&](Engine& engine) {
    run_case(drawn, engine, steps, evaluations);
    runs[static_cast<std::size_t>(engine.runtime().rank())] = results_of(engine);
  });
  return runs;
}

/// Draws everything except the model and its sequence; `frozen` has patterns that are occasionally frozen.
inline void draw_configuration(Draw& draw, const std::vector<std::string>& frozen, MemoryCase& drawn) {
  drawn.ranks = 1 + static_cast<int>(draw.below(8));
  drawn.rank = static_cast<int>(draw.below(drawn.ranks));
  Config& config = drawn.config;
  config.micro_batch_size = 1 + draw.below(3);
  config.accumulation_steps = 1 + draw.below(3);
  config.stage = static_cast<int>(draw.below(4));
  config.reduction =
      draw.of({ReductionPolicy::automatic, ReductionPolicy::boundary, ReductionPolicy::micro_batch});
  config.reduction_group = static_cast<int>(draw.below(drawn.ranks + 1));
  config.overlap = draw.below(4) != 0;
  config.depth = 1 + static_cast<int>(draw.below(4));
  if (draw.flip()) {
    config.reduce_bucket_elements = 1 + draw.below(20000);
    config.allgather_bucket_elements = 1 + draw.below(20000);
  }
  if (draw.below(3) == 0) {
    config.prefetch_elements = draw.below(20000);
    config.max_live_elements = draw.below(40000);
  }
  auto& precision = config.precision;
  precision.compute = draw.of({DataType::float32, DataType::bfloat16, DataType::bfloat16, DataType::float16});
  precision.communication =
      draw.below(3) == 0 ? draw.of({DataType::float32, DataType::bfloat16}) : precision.compute;
  precision.accumulation = draw.of({DataType::float32, DataType::float32, DataType::bfloat16});
  precision.moments = draw.of({DataType::float32, DataType::block8, DataType::bfloat16});
  config.loss_scaling = precision.compute == DataType::float16;
  config.optimizer.type = draw.below(4) == 0 ? "SGD" : "AdamW";
  if (config.optimizer.type == "SGD") precision.moments = DataType::float32;  // otherwise it is refused
  if (draw.below(4) == 0) config.frozen = frozen;
  config.activation_checkpointing = draw.flip();
  config.checkpoint_every = 1 + static_cast<int>(draw.below(4));
  config.vocabulary_chunk = draw.flip() ? 0 : 1 + draw.below(drawn.language_model()->shape().vocabulary);
  config.workspace_bytes = kernels::minimum_workspace_bytes;
  config.staging_bytes = (std::int64_t{1} << 16) + 256 * draw.below(1000);
  config.threads = 1;
  config.communication_timeout = 60;
  config.offload.activations = config.activation_checkpointing && draw.flip();
  const auto tier = [&] { return draw.of({OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}); };
  if (draw.flip()) config.offload.optimizer = tier();
  if (draw.flip() && config.stage == 3) config.offload.parameters = tier();
  config.offload.ratio = draw.of({1.0, 1.0, 0.6, 0.3});
  config.offload.tile_elements = 4096 * (1 + draw.below(4));
  config.offload.tile_buffers = 3 + static_cast<int>(draw.below(3));
  config.offload.parameter_buffers = 2 + static_cast<int>(draw.below(3));
  config.offload.nvme_path = std::filesystem::temp_directory_path().string();
  if (config.frozen.empty() && draw.below(4) == 0) {
    config.lora = {
        .rank = 1 + draw.below(9), .dropout = draw.of({0.0, 0.0, 0.25}), .rank_scaled = draw.flip()};
    if (draw.flip()) config.lora.targets = {"*_proj", "lm_head"};
  }
  config.offload.host_state = draw.flip() ? 0 : 4096 * draw.below(64);
}

}  // namespace tranche::models
