#pragma once
/// GPTs and configurations drawn for the laws of memory, and what a run of them holds and sends, really or on
/// the meta device.

#include <fmt/format.h>

#include <array>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "training_fixture.h"
#include "tranche/device/ledger.h"

namespace tranche::models {

/// Draws by (law, case, number of the draw): a line that names law and case reproduces everything.
class Draw {
 public:
  Draw(std::uint64_t law, std::uint64_t index) : key_{law, RandomPurpose::test, index} {}
  /// 0 to n - 1.
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
  std::int64_t sequence = 8;
  int ranks = 1;
  int rank = 0;  ///< the one that is planned
  Config config;
  std::string to_string() const {
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

/// Steps until memory is packed and used so, then `evaluations` micro-batches of validation and another step.
inline void run_case(const MemoryCase& drawn, Engine& engine, int steps, int evaluations) {
  const Gpt gpt(drawn.model);
  const Config& config = engine.config();
  TokenData data(drawn.sequence, drawn.model.vocabulary, false);
  const bool meta = engine.device().kind() == DeviceKind::meta;
  std::vector<std::int64_t> samples(static_cast<std::size_t>(config.micro_batch_size), 0);
  const Shape shape{config.micro_batch_size, drawn.sequence};
  const auto batch = [&]() -> TokenBatch {
    if (meta) return {{nullptr, DataType::int32, shape}, {nullptr, DataType::int32, shape}, samples};
    data.draw(engine.runtime().rank(), config.micro_batch_size);
    return data.batch();
  };
  const auto step = [&] {
    for (std::int64_t m = 0; m < config.accumulation_steps; ++m) gpt.forward_backward(engine, batch());
    (void)engine.step();
  };
  for (int s = 0; s < steps; ++s) step();
  if (evaluations == 0) return;
  engine.begin_evaluation();
  for (int e = 0; e < evaluations; ++e) gpt.evaluate(engine, batch());
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

/// The case's rank among ranks that are not there.
inline MemoryRun plan_case(const MemoryCase& drawn, int steps = 3, int evaluations = 0) {
  Config config = drawn.config;
  validate_config(config, drawn.ranks);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.device = DeviceKind::meta;
  options.log_level = LogLevel::off;
  Runtime runtime(options, [&](const CommunicatorOptions& o) {
    return make_meta_communicator(drawn.rank, drawn.ranks, drawn.ranks, o);
  });
  Engine engine(runtime, Gpt::spec(drawn.model, drawn.sequence), config);
  run_case(drawn, engine, steps, evaluations);
  return results_of(engine);
}

/// The same on all ranks, as threads of this process; by rank.
inline std::vector<MemoryRun> measure_case(const MemoryCase& drawn, int steps = 3, int evaluations = 0) {
  std::vector<MemoryRun> runs(static_cast<std::size_t>(drawn.ranks));
  on_ranks(drawn.ranks, Gpt::spec(drawn.model, drawn.sequence), drawn.config, [&](Engine& engine) {
    run_case(drawn, engine, steps, evaluations);
    runs[static_cast<std::size_t>(engine.runtime().rank())] = results_of(engine);
  });
  return runs;
}

}  // namespace tranche::models
