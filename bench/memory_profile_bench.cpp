// The cost of a memory profile. Two engines of the same model in one process alternate their steps, one of
// them with a profile (timeline, spans of every kernel, samples of the process's memory).
// bench_memory_profile [--model gpt-mini] [--rounds 60] [--micro-batch 4] [--sequence 128] [--control 1]
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "bench/flags.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/models/model_registry.h"
#include "tranche/report/memory_profile.h"

using namespace tranche;
using namespace tranche::bench;

namespace {

struct Settings {
  std::string model = "gpt-mini";
  std::int64_t rounds = 60, micro_batch = 4, sequence = 128;
  std::string control = "0";  ///< 1: neither is profiled, which shows the resolution of the bench
};

class Side {
 public:
  Side(const Settings& settings, bool profiled)
      : model_(models::ModelRegistry::with_builtin().resolve(settings.model)),
        tokens_(static_cast<std::size_t>(settings.micro_batch * settings.sequence), 1),
        samples_(static_cast<std::size_t>(settings.micro_batch), 0) {
    Config config;
    config.micro_batch_size = config.train_batch_size = settings.micro_batch;
    config.threads = 1;
    RuntimeOptions options = RuntimeOptions::from(config);
    options.trace = profiled;
    options.trace_events = 1 << 16;
    runtime_ = std::make_unique<Runtime>(options, [](const CommunicatorOptions& communicator) {
      return make_self_communicator(communicator);
    });
    if (profiled) profile_ = std::make_unique<MemoryProfile>(*runtime_);
    engine_ = std::make_unique<Engine>(*runtime_, model_->spec(settings.sequence), config);
    view_ = {tokens_.data(), DataType::int32, {settings.micro_batch, settings.sequence}};
  }
  Seconds step() {
    const Seconds begin = clocks_now();
    model_->forward_backward(*engine_, {view_, view_, samples_});
    const StepResult result = engine_->step();
    if (profile_) profile_->end_step(result.step);
    return clocks_now() - begin;
  }
  std::int64_t events() const { return profile_ ? profile_->timeline().record().events() : 0; }
  std::int64_t spans() const { return runtime_->trace() != nullptr ? runtime_->trace()->size() : 0; }

 private:
  std::shared_ptr<const models::LanguageModel> model_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::int64_t> samples_;
  TensorView view_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<MemoryProfile> profile_;
  std::unique_ptr<Engine> engine_;
};

Settings parse(int argc, char** argv) {
  Settings settings;
  parse_flags(
      argc, argv,
      {text_flag("--model", settings.model), number_flag("--rounds", settings.rounds),
       number_flag("--micro-batch", settings.micro_batch), number_flag("--sequence", settings.sequence),
       choice_flag("--control", settings.control, {"0", "1"})});
  if (std::min({settings.rounds, settings.micro_batch, settings.sequence}) < 1) {
    throw ConfigurationError("--rounds, --micro-batch and --sequence must be at least 1");
  }
  return settings;
}

void run(const Settings& settings) {
  Side plain(settings, false), profiled(settings, settings.control == "0");
  for (int warm = 0; warm < 3; ++warm) {
    plain.step();
    profiled.step();
  }
  const std::int64_t events_before = profiled.events(), spans_before = profiled.spans();
  std::vector<double> wall, processor, wall_ratio, processor_ratio;
  for (std::int64_t round = 0; round < settings.rounds; ++round) {
    // The order alternates, so that after-effects favour neither.
    Seconds without, with;
    if (round % 2 == 0) without = plain.step();
    with = profiled.step();
    if (round % 2 == 1) without = plain.step();
    wall.push_back(without.wall);
    processor.push_back(without.processor);
    wall_ratio.push_back(with.wall / without.wall);
    processor_ratio.push_back(with.processor / without.processor);
  }
  const auto per_step = [&](std::int64_t after, std::int64_t before) {
    return static_cast<double>(after - before) / static_cast<double>(settings.rounds);
  };
  fmt::print("{}: step of {:.1f} ms ({:.1f} ms of processor), {:.0f} ledger events and {:.0f} spans a step\n",
             settings.model, 1e3 * quantile(wall, 0.5), 1e3 * quantile(processor, 0.5),
             per_step(profiled.events(), events_before), per_step(profiled.spans(), spans_before));
  for (const auto& [name, ratios] :
       {std::pair("wall clock", &wall_ratio), std::pair("processor", &processor_ratio)}) {
    fmt::print("profiled / plain, {}: median {:.4f}, quartiles {:.4f} to {:.4f} of {} pairs\n", name,
               quantile(*ratios, 0.5), quantile(*ratios, 0.25), quantile(*ratios, 0.75), settings.rounds);
  }
  fmt::print("model={} profiled_of_plain={:.4f} profiled_of_plain_wall={:.4f}\n", settings.model,
             quantile(processor_ratio, 0.5), quantile(wall_ratio, 0.5));
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("bench_memory_profile", [&] { run(parse(argc, argv)); });
}
