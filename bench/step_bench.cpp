// The speed of a training step on CPUs. Steps of the engine alternate with the list of their GEMMs without
// anything else, and every millisecond of the step is attributed to a part. Several models alternate, and
// each is compared with the first.
//   bench_step [--model gpt2[,llama-160m,...]] [--dtype bf16|fp32] [--sequence 1024] [--micro-batch 1]
//       [--accumulate 1] [--threads 2] [--rounds 7] [--dropout P] [--checkpointing 0|1]
//       [--clock wall|processor] [--json FILE]
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "bench/bare_gemms.h"
#include "bench/figures.h"
#include "bench/flags.h"
#include "bench/step_parts.h"
#include "device/cpu/cpu_streams.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/matmul.h"
#include "tranche/models/model_registry.h"

using namespace tranche;
using namespace tranche::bench;

namespace {

struct Settings {
  std::string model = "gpt2", dtype = "bf16", clock = "wall", json;
  std::int64_t sequence = 1024, micro_batch = 1, accumulate = 1, rounds = 7;
  int threads = 2;
  double dropout = -1;  ///< below 0: the model's own dropout
  std::string checkpointing = "0";
};

Settings parse(int argc, char** argv) {
  Settings settings;
  parse_flags(
      argc, argv,
      {text_flag("--model", settings.model), choice_flag("--dtype", settings.dtype, {"bf16", "fp32"}),
       number_flag("--sequence", settings.sequence), number_flag("--micro-batch", settings.micro_batch),
       number_flag("--accumulate", settings.accumulate), number_flag("--rounds", settings.rounds),
       number_flag("--threads", settings.threads), number_flag("--dropout", settings.dropout),
       choice_flag("--checkpointing", settings.checkpointing, {"0", "1"}),
       choice_flag("--clock", settings.clock, {"wall", "processor"}), text_flag("--json", settings.json)});
  if (std::min({settings.sequence, settings.micro_batch, settings.accumulate, settings.rounds}) < 1 ||
      settings.threads < 1) {
    throw ConfigurationError(
        "--sequence, --micro-batch, --accumulate, --rounds and --threads must be at least 1");
  }
  return settings;
}

double processor_now() {
  return clocks_now().processor;
}

std::shared_ptr<const models::LanguageModel> model_of(const std::string& name, const Settings& settings) {
  const models::ModelRegistry registry = models::ModelRegistry::with_builtin();
  const std::shared_ptr<const models::LanguageModel> model = registry.resolve(name);
  if (settings.dropout < 0) return model;
  nlohmann::json config = nlohmann::json::parse(model->to_json());
  for (const auto& [key, value] : config.items()) {
    if (key.ends_with("dropout") || key.ends_with("pdrop")) value = settings.dropout;
  }
  return registry.from_json(config.dump(), name);
}

/// An engine of one rank and a batch of random tokens for it.
class Trainer {
 public:
  Trainer(const std::string& model, const Settings& settings)
      : model_(model_of(model, settings)), micro_batches_(settings.accumulate) {
    Config config;
    config.micro_batch_size = settings.micro_batch;
    config.accumulation_steps = settings.accumulate;
    config.train_batch_size = settings.micro_batch * settings.accumulate;
    config.threads = settings.threads;
    config.activation_checkpointing = settings.checkpointing == "1";
    if (settings.dtype == "fp32")
      config.precision.compute = config.precision.communication = DataType::float32;
    RuntimeOptions options = RuntimeOptions::from(config);
    options.trace = true;
    options.log_level = LogLevel::warning;
    runtime_ = std::make_unique<Runtime>(options, [](const CommunicatorOptions& communicator) {
      return make_self_communicator(communicator);
    });
    if (settings.clock == "processor") stream().attachment<detail::SpanClock>().now = &processor_now;
    engine_ = std::make_unique<Engine>(*runtime_, model_->spec(settings.sequence), config);
    std::minstd_rand draw(7);
    std::uniform_int_distribution<std::int32_t> token(
        0, static_cast<std::int32_t>(model_->shape().vocabulary) - 1);
    tokens_.resize(static_cast<std::size_t>(settings.micro_batch * (settings.sequence + 1)));
    for (auto& id : tokens_) id = token(draw);
    for (std::int64_t i = 0; i < settings.micro_batch; ++i) samples_.push_back(i);
    const Shape shape{settings.micro_batch, settings.sequence};
    batch_ = {
        {tokens_.data(), DataType::int32, shape}, {tokens_.data() + 1, DataType::int32, shape}, samples_};
  }

  Seconds step() {
    const Seconds begin = clocks_now();
    for (std::int64_t i = 0; i < micro_batches_; ++i) model_->forward_backward(*engine_, batch_);
    engine_->step();
    return clocks_now() - begin;
  }
  Stream& stream() { return runtime_->device().compute_stream(); }
  const TraceRecorder& trace() const { return *runtime_->trace(); }
  const Engine& engine() const { return *engine_; }

 private:
  std::shared_ptr<const models::LanguageModel> model_;
  std::int64_t micro_batches_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::int64_t> samples_;
  models::TokenBatch batch_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Engine> engine_;
};

std::string text_of(const kernels::Gemm& p) {
  return fmt::format("{}x{}x{} {}{}{} {}", p.m, p.n, p.k, p.transpose_a ? 't' : 'n',
                     p.transpose_b ? 't' : 'n', p.accumulate ? '+' : ' ',
                     p.c_dtype == p.dtype ? "" : "to fp32");
}

/// Runs a model's steps and bare GEMMs, one round at a time.
class ModelRun {
 public:
  ModelRun(const std::string& model, const Settings& settings)
      : model_(model),
        settings_(settings),
        trainer_(model, settings),
        products_(products_of_step(trainer_)),
        bare_(products_, settings.threads) {
    for (int warm = 0; warm < 2; ++warm) trainer_.step();  // packs the step's memory
  }

  void round() {
    const std::int64_t spans = trainer_.trace().size();
    const Seconds step = trainer_.step();
    parts_.add_step(trainer_.trace(), trainer_.stream().name(), spans, chosen(step));
    bare_.round();
    step_wall_.push_back(step.wall);
    step_processor_.push_back(step.processor);
    ++rounds_;
  }

  /// The time of the bare GEMMs divided by that of the step, as the median over rounds by the chosen clock.
  double bare_of_step() const { return median(ratios(processor())); }

  void print() const {
    const double step = median(processor() ? step_processor_ : step_wall_);
    fmt::print("{} {}, sequence {}, micro-batch {} x {}, {} threads, {} rounds; {}, {}\n", model_,
               settings_.dtype, settings_.sequence, settings_.micro_batch, settings_.accumulate,
               settings_.threads, rounds_, processor() ? "processor seconds" : "wall clock",
               kernels::matmul_libraries(DeviceKind::cpu));
    fmt::print("\n{:<28}{:>6}{:>12}{:>12}{:>12}{:>12}  {}\n", "GEMM (m x n x k)", "count", "best ms",
               "ours ms", "in step ms", "GFLOP/s", "best way");
    std::map<kernels::Gemm, double> in_step = seconds_in_step();
    for (const auto& line : bare_.lines()) {
      fmt::print("{:<28}{:>6}{:>12.3f}{:>12.3f}{:>12.3f}{:>12.1f}  {}\n", text_of(line.gemm), line.count,
                 1e3 * chosen(line.best), 1e3 * chosen(line.ours),
                 1e3 * in_step[line.gemm] / static_cast<double>(line.count),
                 1e-9 * line.operations / chosen(line.best), line.best_by_processor);
    }
    fmt::print("\n{:<34}{:>8}{:>12}{:>9}\n", "part of the step", "calls", "ms", "share");
    for (const auto& part : parts_.lines()) {
      fmt::print("{:<34}{:>8}{:>12.2f}{:>8.1f}%\n", part.name, part.calls, 1e3 * part.seconds,
                 100 * part.seconds / step);
    }
    fmt::print("\nstep_ms={:.1f} bare_ms={:.1f} bare_ours_ms={:.1f} tokens_per_s={:.1f}\n", 1e3 * step,
               1e3 * median(bare_seconds(processor(), false)), 1e3 * median(bare_seconds(processor(), true)),
               static_cast<double>(settings_.sequence * settings_.micro_batch * settings_.accumulate) /
                   median(step_wall_));
    fmt::print(
        "bare_of_step={:.4f} (quartiles {:.4f} to {:.4f}) processor_bare_of_step={:.4f} named={:.4f}\n",
        bare_of_step(), quantile(ratios(processor()), 0.25), quantile(ratios(processor()), 0.75),
        median(ratios(true)), parts_.named_share());
  }

  nlohmann::json to_json() const {
    nlohmann::json out{
        {"schema", "tranche-bench-step-1"},
        {"model", model_},
        {"dtype", settings_.dtype},
        {"sequence", settings_.sequence},
        {"micro_batch", settings_.micro_batch},
        {"accumulate", settings_.accumulate},
        {"threads", settings_.threads},
        {"rounds", rounds_},
        {"clock", settings_.clock},
        {"libraries", kernels::matmul_libraries(DeviceKind::cpu)},
        {"step_seconds", {{"wall", step_wall_}, {"processor", step_processor_}}},
        {"bare_seconds", {{"wall", bare_seconds(false, false)}, {"processor", bare_seconds(true, false)}}},
        {"bare_of_step", bare_of_step()},
        {"processor_bare_of_step", median(ratios(true))},
        {"wall_bare_of_step", median(ratios(false))},
        {"named_share", parts_.named_share()}};
    for (const auto& line : bare_.lines()) {
      out["products"].push_back({{"product", text_of(line.gemm)},
                                 {"count", line.count},
                                 {"best_seconds", chosen(line.best)},
                                 {"our_seconds", chosen(line.ours)},
                                 {"best_way", line.best_by_processor}});
    }
    for (const auto& part : parts_.lines()) {
      out["parts"].push_back({{"part", part.name}, {"calls", part.calls}, {"seconds", part.seconds}});
    }
    return out;
  }

 private:
  static std::vector<kernels::Gemm> products_of_step(Trainer& trainer) {
    std::vector<kernels::Gemm> gemms;
    kernels::log_gemms(trainer.stream(), &gemms);
    trainer.step();
    kernels::log_gemms(trainer.stream(), nullptr);
    return gemms;
  }
  /// Seconds in all GEMMs of each shape, with the bias or activation that some of them compute as well.
  std::map<kernels::Gemm, double> seconds_in_step() const {
    const std::vector<double> seconds = parts_.products();
    std::map<kernels::Gemm, double> sums;
    for (std::size_t i = 0; i < seconds.size(); ++i) sums[products_.at(i)] += seconds[i];
    return sums;
  }
  bool processor() const { return settings_.clock == "processor"; }
  double chosen(const Seconds& seconds) const { return processor() ? seconds.processor : seconds.wall; }
  std::vector<double> bare_seconds(bool by_processor, bool ours) const {
    std::vector<double> made;
    for (std::size_t round = 0; round < rounds_; ++round) {
      const Seconds list = bare_.list_seconds(round, ours);
      made.push_back(by_processor ? list.processor : list.wall);
    }
    return made;
  }
  std::vector<double> ratios(bool by_processor) const {
    std::vector<double> made = bare_seconds(by_processor, false);
    for (std::size_t round = 0; round < made.size(); ++round) {
      made[round] /= by_processor ? step_processor_[round] : step_wall_[round];
    }
    return made;
  }

  std::string model_;
  Settings settings_;
  Trainer trainer_;
  std::vector<kernels::Gemm> products_;
  BareGemms bare_;
  StepParts parts_;
  std::size_t rounds_ = 0;
  std::vector<double> step_wall_, step_processor_;
};

void run(const Settings& settings) {
  const std::vector<std::string> models = comma_list(settings.model);
  std::vector<std::unique_ptr<ModelRun>> runs;
  for (const std::string& model : models) runs.push_back(std::make_unique<ModelRun>(model, settings));
  for (std::int64_t round = 0; round < settings.rounds; ++round) {
    for (const auto& run : runs) run->round();
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (i > 0) fmt::print("\n");
    runs[i]->print();
  }
  for (std::size_t i = 1; i < runs.size(); ++i) {
    fmt::print("{}_of_{}={:.4f}\n", models[i], models[0], runs[i]->bare_of_step() / runs[0]->bare_of_step());
  }
  if (settings.json.empty()) return;

  nlohmann::json out = runs[0]->to_json();
  if (runs.size() > 1) {
    out = nlohmann::json::array();
    for (const auto& run : runs) out.push_back(run->to_json());
  }
  std::ofstream file(settings.json);
  file << out.dump(1) << "\n";
  file.close();
  if (!file)
    throw IoError(fmt::format("cannot write --json {}: {}", settings.json, std::strerror(errno)), errno);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("bench_step", [&] { run(parse(argc, argv)); });
}
