// tranche train.

#include <fmt/format.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <ostream>
#include <thread>

#include "tranche/core/clock.h"
#include "tranche/core/error.h"
#include "tranche/tools/files.h"
#include "tranche/tools/progress.h"
#include "tranche/tools/run.h"
#include "tranche/tools/terminal.h"

namespace tranche::tools {

namespace {

constexpr double sample_temperature = 0.8;

class Training {
 public:
  explicit Training(Run& run) : run_(run), progress_(progress_options(run), writer(run)) {}

  void operator()() {
    const Stopwatch clock;
    std::int64_t step = 0;
    bool enough = false;
    while (step < run_.settings.steps && !enough) {
      const StepResult result = train_step(++step);
      if (run_.speaks()) {
        run_.report.add_step(result);
        progress_.step(result, clock.seconds());
      }
      if (due(run_.options.digest_every, step)) {
        const kernels::Digest digest = run_.engine->weights_digest();
        if (run_.speaks()) run_.report.add_step_digest(digest);
      }
      enough = time_is_up(clock.seconds(), step);
      if (due(run_.options.eval_every, step) && step < run_.settings.steps && !enough) {
        const EvaluationResult held_out = run_.validate(step);
        if (run_.speaks()) progress_.say(fmt::format("step {}: validation loss {:.4f}", step, held_out.loss));
      }
      last_ = result;
    }
    progress_.finish();
    finish(clock.seconds());
  }

 private:
  static ProgressOptions progress_options(const Run& run) {
    ProgressOptions options;
    options.steps = run.settings.steps;
    options.maximum_seconds = run.options.max_seconds;
    options.minimum_steps = run.options.min_steps;
    options.log_every =
        run.options.log_every > 0 ? run.options.log_every : run.settings.config.steps_per_print;
    options.flops_per_token = run.settings.model.flops_per_token(run.settings.sequence);
    options.peak_flops = run.peak_flops;
    options.terminal = run.output.terminal;
    return options;
  }
  static Progress::Writer writer(const Run& run) {
    return [&out = run.output.out](std::string_view text) { out << text << std::flush; };
  }
  static bool due(std::int64_t every, std::int64_t step) { return every > 0 && step % every == 0; }

  StepResult train_step(std::int64_t step) {
    const BatchShape& shape = run_.settings.batch;
    const int rank = run_.runtime->rank();
    for (std::int64_t m = 0; m < shape.accumulation; ++m) {
      // In the middle of a step, where peers are waiting.
      if (m == shape.accumulation - 1) inject(rank, step, m);
      const std::vector<std::int64_t> samples = sample_numbers(shape, step, m, rank);
      std::vector<std::int64_t> windows;
      for (const std::int64_t sample : samples) {
        windows.push_back(window_of_sample(sample, run_.data.training->count(), run_.settings.config.seed));
      }
      run_.model->forward_backward(*run_.engine, run_.feeder->fill(*run_.data.training, windows, samples));
    }
    return run_.engine->step();
  }

  void inject(int rank, std::int64_t step, std::int64_t micro_batch) const {
    const Options& options = run_.options;
    if (options.fail.rank == rank && options.fail.step == step) {
      throw Error(fmt::format("--debug-fail: told to fail in step {}, micro-batch {}", step, micro_batch));
    }
    if (options.hang.rank == rank && options.hang.step == step) {
      for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
    }
  }

  /// Collective: ranks have clocks of their own, but end after the same step.
  bool time_is_up(double elapsed, std::int64_t step) {
    if (run_.options.max_seconds <= 0) return false;
    std::int64_t up = elapsed >= run_.options.max_seconds && step >= run_.options.min_steps ? 1 : 0;
    run_.runtime->all()
        .all_reduce(&up, 1, DataType::int64, ReduceOperation::maximum, {"program", "time", Traffic::control})
        .wait();
    return up != 0;
  }

  void finish(double seconds) {
    if (run_.speaks()) {
      progress_.say(fmt::format("validating on {} held-out windows", run_.data.evaluation.size()));
    }
    const EvaluationResult held_out = run_.validate(last_.step);
    const kernels::Digest weights = run_.engine->weights_digest(), state = run_.engine->state_digest();
    const std::string memory = run_.engine->memory_report();
    std::string sample;
    if (run_.options.sample_bytes > 0) {
      sample = sample_text(*run_.engine, *run_.model, "\n\n", run_.options.sample_bytes,
                           run_.settings.sequence, sample_temperature, run_.settings.config.seed);
    }
    if (run_.speaks()) conclude(held_out, weights, state, memory, sample, seconds);
    if (!run_.options.trace.empty()) {
      run_.runtime->trace()->save(
          path_of_rank(run_.options.trace, run_.runtime->rank(), run_.runtime->size()));
    }
  }

  void conclude(const EvaluationResult& held_out, const kernels::Digest& weights,
                const kernels::Digest& state, const std::string& memory, const std::string& sample,
                double seconds) {
    std::ostream& out = run_.output.out;
    Report& report = run_.report;
    const std::string traffic = run_.engine->traffic_report();
    report.set_engine(memory, traffic, run_.engine->model_report());
    report.set_digests(weights, state);
    report.set_speed(progress_.mean_tokens_per_second(), run_.peak_flops, progress_.mean_peak_share());
    out << fmt::format("trained {} steps in {}: loss {:.4f}, validation loss {:.4f} over {} tokens\n",
                       last_.step, format_duration(seconds), last_.loss, held_out.loss, held_out.tokens);
    out << fmt::format("{:.0f} tokens/s, {:.1f}% of the matmul peak; weights {}\n",
                       progress_.mean_tokens_per_second(), 100 * progress_.mean_peak_share(),
                       format_digest(weights));
    if (run_.options.ngrams) {
      const NgramEntropies entropies = run_.ngrams();
      report.set_ngrams(entropies);
      out << fmt::format(
          "held-out nats per byte: bigram {:.4f}, trigram {:.4f}, this model {:.4f} ({:+.4f} to the "
          "bigram)\n",
          entropies.bigram, entropies.trigram, held_out.loss, held_out.loss - entropies.bigram);
    }
    out << "memory of rank 0:\n" << run_.runtime->ledger().table();
    out << traffic_line(traffic);
    if (!sample.empty()) {
      report.set_sample(sample);
      out << "sample of generated text:\n" << printable(sample) << "\n";
    }
    if (!run_.options.report.empty()) {
      write_file_atomically(run_.options.report, report.to_json());
      out << "report: " << run_.options.report << "\n";
    }
    out.flush();
  }

  static std::string traffic_line(const std::string& traffic) {
    const auto document = nlohmann::json::parse(traffic);
    std::int64_t elements = 0, bytes = 0;
    for (const auto& [operation, count] : document.items()) {
      if (operation == "control" || !count.is_object()) continue;
      elements += count["elements"].get<std::int64_t>();
      bytes += count["bytes"].get<std::int64_t>();
    }
    return fmt::format("traffic of a step and rank: {} elements ({} bytes); by the formula {}\n", elements,
                       bytes, document["formula_elements"].get<std::int64_t>());
  }

  Run& run_;
  Progress progress_;
  StepResult last_;
};

}  // namespace

int run_train(const Options& options, const Output& output) {
  Run run(options, output);
  return run.execute([&run] {
    Training training(run);
    training();
  });
}

}  // namespace tranche::tools
