// tranche train.

#include <fmt/format.h>

#include <chrono>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "tools/files.h"
#include "tools/terminal.h"
#include "tools/train/evaluation.h"
#include "tools/train/offload_summary.h"
#include "tools/train/profiling.h"
#include "tools/train/progress.h"
#include "tools/train/run.h"
#include "tools/train/run_trace.h"
#include "tools/train/stage_times.h"
#include "tranche/core/error.h"
#include "tranche/report/scalar_log.h"
#include "tranche/training/checkpoint_schedule.h"
#include "tranche/training/metrics.h"
#include "tranche/training/stop_signals.h"

namespace tranche::tools {

namespace {

constexpr double sample_temperature = 0.8;
/// The number of steps after which processor seconds are summed over the ranks.
constexpr std::size_t steps_shared = 64;

/// The processor time of all threads of this process so far, user and system.
double processor_seconds_now() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

/// The peak of each tier on rank 0, with a summary first.
std::string memory_at_peak(const Ledger& ledger) {
  std::string text;
  for (const Tier tier : all_tiers) {
    const TierAccount account = ledger.account(tier);
    if (account.peak == 0) continue;
    text += fmt::format("memory of rank 0: {} peak {}{}\n", name_of(tier), format_bytes(account.peak),
                        account.peak_phase.empty() ? "" : " in " + account.peak_phase);
    for (const Category category : all_categories) {
      if (account.at_peak[category] == 0) continue;
      text += fmt::format("  {:<14}{:>14}\n", name_of(category), format_bytes(account.at_peak[category]));
    }
  }
  return text.empty() ? "memory of rank 0: none\n" : text;
}

class Training {
 public:
  /// Collective. `signals` is null if nothing can request a stop.
  Training(Run& run, training::StopSignals* signals)
      : run_(run),
        signals_(signals),
        progress_(progress_options(run), writer(run)),
        checkpoints_(*run.engine, checkpoint_options(),
                     [this](const training::CompletedCheckpoint& checkpoint) { completed(checkpoint); }) {
    last_.step = begin_ = run.engine->steps();
    if (run.is_root() && !run.options.metrics.empty()) open_metrics();
    if (run.is_root()) open_curves();
    Runtime& runtime = *run.runtime;
    if (!run.options.trace.empty() && runtime.size() > 1) {
      trace_.emplace(*runtime.trace(), runtime.all(), runtime.mesh());
    }
  }

  /// Collective. Trains; returns true if a signal ended the run.
  bool operator()() {
    const detail::Stopwatch clock;
    std::int64_t step = run_.engine->steps();
    bool enough = false;
    if (step >= run_.settings.steps && run_.is_root()) {
      progress_.say(fmt::format(
          "note: step {} of {} is reached already: nothing to train; --steps is the step to reach", step,
          run_.settings.steps));
    }
    // The checkpoint may be of a run that a signal stopped before its validation.
    bool unvalidated = run_.validation_due && step < run_.settings.steps && run_.options.eval_every > 0 &&
                       !validate_unless_stopped(step);
    while (step < run_.settings.steps && !enough && !unvalidated) {
      const StepResult result = train_or_save(++step);
      if (run_.is_root()) {
        run_.report.add_step(result);
        progress_.step(result, clock.seconds());
        if (metrics_) add_metrics(training::step_line(result));
        add_curves(training::step_scalars(result, scales_loss()));
        const bool offloads = run_.settings.config.offload.any();
        if (offloads) offload_.add(result);
        if (run_.settings.config.wall_clock_breakdown && progress_.due(step)) {
          progress_.say(format_step_times(result));
          if (offloads) progress_.say(OffloadSummary::line_of(result));
        }
      }
      if (due(run_.options.digest_every, step)) {
        const kernels::Digest weights = run_.engine->weights_digest(), state = run_.engine->state_digest();
        if (run_.is_root()) run_.report.add_step_digest(weights, state);
        if (metrics_) {  // before the step is saved, so that a resumed run can be compared
          add_metrics(fmt::format(R"({{"step":{},"weights_digest":"{}","state_digest":"{}"}})", step,
                                  format_digest(weights), format_digest(state)));
        }
      }
      last_ = result;
      if (run_.lease && run_.lease->lost())
        run_.lease->require_held();  // throws an error that names the new
                                     // holder
      const bool evaluates = due(run_.options.eval_every, step) && step < run_.settings.steps;
      checkpoints_.after_step(result, evaluates && (run_.options.keep_best || result.stop_requested));
      if (result.stop_requested) {
        unvalidated = evaluates;
        break;
      }
      if (processor_seconds_.size() == steps_shared) share_processor_seconds();
      enough = time_is_up(clock.seconds(), step);
      if (evaluates && !enough) unvalidated = !validate_unless_stopped(step);
    }
    progress_.finish();
    checkpoints_.save(unvalidated);
    if (last_.stop_requested) {
      stop(clock.seconds());
    } else {
      finish(clock.seconds());
    }
    return last_.stop_requested;
  }

  /// True if the last loss or gradient was not finite. Equal on all ranks.
  bool ended_in_doubt() const { return run_.engine->in_doubt(); }

 private:
  static ProgressOptions progress_options(const Run& run) {
    ProgressOptions options;
    options.begin = run.engine->steps();
    options.steps = run.settings.steps;
    options.maximum_seconds = run.options.max_seconds;
    options.minimum_steps = run.options.min_steps;
    options.log_every =
        run.options.log_every > 0 ? run.options.log_every : run.settings.config.steps_per_print;
    options.flops_per_token = run.settings.model->flops_per_token(run.settings.sequence);
    options.peak_flops = run.peak_flops;
    options.terminal = run.output.terminal;
    return options;
  }
  static Progress::Writer writer(const Run& run) {
    return [&out = run.output.out](std::string_view text) { draw(out, text); };
  }
  training::CheckpointScheduleOptions checkpoint_options() {
    const Run& run = run_;
    training::CheckpointScheduleOptions options;
    if (run.is_root()) options.say = [this](const std::string& line) { progress_.say("note: " + line); };
    options.folder = run.options.checkpoint_dir;
    options.every = run.options.save_every;
    options.user = run.identity;
    options.keep_last = static_cast<int>(run.options.keep_last);
    options.keep_every = run.options.keep_every;
    if (run.options.keep_best) {
      options.keep_best =
          run.options.best_by.empty() ? run.data.validation.front().key() : run.options.best_by;
    }
    return options;
  }
  /// " of code", for a set with a name.
  static std::string of_set(const training::Evaluation& evaluation) {
    return evaluation.set.empty() ? "" : " of " + evaluation.set;
  }
  /// The evaluations with the sets' names and digests in checkpoints.
  std::vector<training::Evaluation> keyed(std::vector<training::Evaluation> evaluations) const {
    for (std::size_t i = 0; i < evaluations.size(); ++i) {
      evaluations[i].set = run_.data.validation[i].key();
      evaluations[i].data = run_.data.validation[i].digest();
    }
    return evaluations;
  }
  bool scales_loss() const { return run_.settings.config.precision.compute == DataType::float16; }
  static bool due(std::int64_t every, std::int64_t step) { return every > 0 && step % every == 0; }

  /// Runs a step. If an error arises on all ranks from their numbers, such as too many skipped steps, it
  /// saves the state before, so that a resume knows that the earlier weights are in doubt.
  StepResult train_or_save(std::int64_t step) {
    try {
      return train_step(step);
    } catch (const NumericalError&) {
      if (run_.options.checkpoint_dir.empty()) throw;
      try {
        checkpoints_.save();
        checkpoints_.finish();
      } catch (const CheckpointError& error) {
        if (run_.is_root()) progress_.say(fmt::format("note: {}", error.message()));
      }
      throw;
    }
  }

  /// Collective. Validates between steps; returns false if a signal ended that, which leaves no result.
  bool validate_unless_stopped(std::int64_t step) {
    checkpoints_.finish();  // so that a run killed during validation has it
    const std::vector<training::Evaluation> held_out =
        run_.validate(step, progress_, [this] { return stop_is_wanted(); });
    if (held_out.empty()) {
      last_.stop_requested = true;
      return false;
    }
    for (const training::Evaluation& evaluation : held_out) {
      if (!run_.is_root()) break;
      progress_.say(
          fmt::format("step {}: validation loss{} {:.4f}", step, of_set(evaluation), evaluation.result.loss));
    }
    add_validation(held_out);
    checkpoints_.evaluated(keyed(held_out));
    return true;
  }

  StepResult train_step(std::int64_t step) {
    const std::int64_t accumulation = run_.settings.batch.accumulation;
    models::train_step(*run_.settings.model, *run_.engine, [&](std::int64_t m) {
      // The fault is injected in the middle of a step, where peers wait.
      if (m == accumulation - 1) inject(run_.runtime->rank(), step, m);
      return run_.feeder->training_batch(*run_.data.training, *run_.data.mixture, m);
    });
    // The signal is read before the ranks agree on the step, so that all of them end with this one.
    if (signals_ != nullptr && signals_->poll() != 0) {
      run_.engine->request_stop();
      if (signals_->poll() == SIGINT && run_.is_root()) {
        progress_.say(fmt::format(
            "SIGINT: the run is saved after step {} and ends; a second one ends it at once", step));
      }
    }
    const StepResult result = run_.engine->step();
    stage_times_.add(result);
    const double processor = processor_seconds_now();
    processor_seconds_.push_back(processor - processor_before_);
    processor_before_ = processor;
    if (run_.profile) run_.profile->end_step(result.step);
    return result;
  }

  void completed(const training::CompletedCheckpoint& checkpoint) {
    if (!run_.is_root()) return;
    run_.report.add_checkpoint(checkpoint);
    progress_.say(fmt::format("checkpoint {} is complete: training paused for {}, all in {}{}",
                              checkpoint.path, format_pause(checkpoint.pause_seconds),
                              format_pause(checkpoint.seconds), checkpoint.best ? "; the best so far" : ""));
  }

  void add_metrics(const std::string& line) {
    const std::string problem = metrics_->add(line);
    if (!problem.empty()) progress_.say("note: " + problem);
  }

  /// Adds them to the metrics and curves of rank 0.
  void add_validation(const std::vector<training::Evaluation>& evaluations) {
    std::vector<Scalar> scalars;
    for (const training::Evaluation& evaluation : evaluations) {
      if (metrics_) {
        add_metrics(training::validation_line(run_.engine->steps(), evaluation.result, evaluation.set));
      }
      scalars.push_back(training::validation_scalar(evaluation.result, evaluation.set));
    }
    add_curves(scalars);
  }

  void open_metrics() {
    const Options& options = run_.options;
    // Another run may have begun the file since this one started.
    training::MetricsFile::require(options.metrics, !options.resume.empty(), "--metrics");
    metrics_.emplace(options.metrics, begin_, "--metrics");
    if (!metrics_->note().empty()) progress_.say("note: " + metrics_->note());
  }

  void open_curves() {
    const Config& config = run_.settings.config;
    const std::int64_t samples = run_.engine->samples();
    if (config.tensorboard.enabled) {
      curves_.push_back(make_tensorboard_log(config.tensorboard.folder(), samples));
    }
    if (config.csv_monitor.enabled) {
      curves_.push_back(make_csv_log(config.csv_monitor.folder(), samples,
                                     [this](const std::string& line) { progress_.say("note: " + line); }));
    }
  }

  /// The curves are over samples, as in DeepSpeed.
  void add_curves(const std::vector<Scalar>& scalars) {
    try {
      for (const auto& log : curves_) log->add(run_.engine->samples(), scalars);
    } catch (const IoError& problem) {  // reported once, because training continues without
      curves_.clear();
      progress_.say(fmt::format("note: curves: {}; training goes on without", problem.message()));
    }
  }

  void inject(int rank, std::int64_t step, std::int64_t micro_batch) {
    const Options& options = run_.options;
    run_.withhold_memory(step);
    if (options.fail.rank == rank && options.fail.step == step) {
      throw Error(fmt::format("--debug-fail: told to fail in step {}, micro-batch {}", step, micro_batch));
    }
    if (options.hang.rank == rank && options.hang.step == step) {
      for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
    }
  }

  /// Collective, because ranks have different clocks but must end after the same step.
  bool time_is_up(double elapsed, std::int64_t step) {
    if (run_.options.max_seconds <= 0) return false;
    return on_any_rank(elapsed >= run_.options.max_seconds && step >= run_.options.min_steps, "time");
  }
  /// Collective, because a signal may reach one rank only.
  bool stop_is_wanted() { return signals_ != nullptr && on_any_rank(signals_->poll() != 0, "stop"); }
  bool on_any_rank(bool here, const char* what) {
    std::int64_t any = here ? 1 : 0;
    run_.runtime->all()
        .all_reduce(&any, 1, DataType::int64, ReduceOperation::maximum, {"program", what, Traffic::control})
        .wait();
    return any != 0;
  }

  /// Collective. Ends a run before its last step because it was requested: first of all its state is saved.
  void stop(double seconds) {
    if (run_.output.exits) signals_->keep_until_exit();
    checkpoints_.finish();
    const kernels::Digest weights = run_.engine->weights_digest(), state = run_.engine->state_digest();
    const std::string memory = run_.engine->memory_report();
    share_processor_seconds();
    share_node_bytes();
    share_stage_times();
    if (run_.profile) run_.profile->end();  // the rest is not part of the training
    save_trace();
    save_profile();
    if (!run_.is_root()) return;
    const int signal = signals_->poll();
    const std::string by = signal != 0 ? training::name_of_signal(signal) : "a signal to another rank";
    run_.report.set_stopped(by);
    report_engine(weights, state, memory);
    run_.output.out << fmt::format(
        "stopped after step {} of {} by {}, {} after the start; {} is complete: the same command with "
        "--resume latest goes on from {}\n",
        last_.step, run_.settings.steps, by, format_duration(seconds), checkpoints_.newest(),
        run_.engine->in_doubt() ? "the newest before it that is not in doubt" : "it");
    run_.output.out << best_line();
    write_report();
  }

  /// Collective. Writes the trace.
  void save_trace() {
    if (run_.options.trace.empty()) return;
    if (trace_) {
      run_.output.out << trace_->save(run_.options.trace) << std::flush;
    } else {
      run_.runtime->trace()->save(run_.options.trace);
    }
  }

  /// Collective. Writes the memory profile.
  void save_profile() {
    if (!run_.profile) return;
    const std::string table = write_profile(run_);
    run_.output.out << table << std::flush;
  }

  /// Collective. Adds up the processor seconds of every rank's steps since the last call.
  void share_processor_seconds() {
    if (processor_seconds_.empty()) return;
    run_.runtime->all()
        .all_reduce(processor_seconds_.data(), static_cast<std::int64_t>(processor_seconds_.size()),
                    DataType::float64, ReduceOperation::sum,
                    {"report", "processor seconds", Traffic::control})
        .wait();
    if (run_.is_root()) run_.report.add_processor_seconds(processor_seconds_);
    processor_seconds_.clear();
  }

  /// Collective. Adds the bytes that every node sent in the last step to the report.
  void share_node_bytes() {
    const auto sent = run_.engine->bytes_to_other_nodes();
    tools::share_node_bytes(run_.runtime->all(), sent ? std::optional(sent->rank) : std::nullopt, run_.nodes);
    if (run_.is_root()) run_.report.set_nodes(run_.nodes);
  }

  /// Collective. Adds the fraction of the steps in which each pipeline stage waited to the report.
  std::vector<StageTime> share_stage_times() {
    const std::vector<StageTime> stages = stage_times_.by_stage(run_.runtime->all(), run_.runtime->mesh());
    if (run_.is_root()) run_.report.set_stages(stages);
    return stages;
  }

  void report_engine(const kernels::Digest& weights, const kernels::Digest& state,
                     const std::string& memory) {
    run_.report.set_engine(memory, run_.engine->traffic_report(), run_.engine->model_report());
    run_.report.set_digests(weights, state);
    if (checkpoints_.best()) run_.report.set_best(*checkpoints_.best());
    run_.report.set_speed(progress_.mean_rate(), run_.peak_flops, progress_.mean_peak_share());
  }

  void write_report() {
    const std::string& path = run_.options.report;
    if (last_.step == begin_ && run_.report.has_state_of(path)) {
      run_.output.out << fmt::format("report: {} stays as it is, because no step was trained\n", path);
    } else if (!path.empty()) {
      run_.report.write();
      run_.output.out << "report: " << path << "\n";
    }
    run_.output.out.flush();
  }

  void finish(double seconds) {
    checkpoints_.finish();  // first, so that a run killed during validation has the last checkpoint
    if (run_.is_root()) {
      std::size_t taken = 0;
      for (const ValidationSet& set : run_.data.validation) taken += set.numbers.size();
      const auto all = static_cast<std::size_t>(run_.data.held_out_windows());
      progress_.say(fmt::format("validating on {} held-out windows{}", taken,
                                taken < all ? fmt::format(" of {}", all) : ""));
    }
    const std::vector<training::Evaluation> held_out = run_.validate(last_.step, progress_);
    progress_.finish();
    if (last_.step > begin_) add_validation(held_out);
    checkpoints_.evaluated(keyed(held_out));
    checkpoints_.finish();
    const kernels::Digest weights = run_.engine->weights_digest(), state = run_.engine->state_digest();
    const std::string memory = run_.engine->memory_report();
    share_processor_seconds();
    share_node_bytes();
    const std::vector<StageTime> stages = share_stage_times();
    if (run_.profile) run_.profile->end();  // the rest is not part of the training
    std::string sample;
    if (run_.options.sample_bytes > 0) {
      sample = sample_text(*run_.engine, *run_.settings.model, "\n\n", run_.options.sample_bytes,
                           run_.settings.sequence, sample_temperature, run_.settings.config.seed);
    }
    if (run_.is_root()) conclude(held_out, weights, state, memory, sample, stages, seconds);
    save_trace();
    save_profile();
  }

  void conclude(const std::vector<training::Evaluation>& held_out, const kernels::Digest& weights,
                const kernels::Digest& state, const std::string& memory, const std::string& sample,
                const std::vector<StageTime>& stages, double seconds) {
    std::ostream& out = run_.output.out;
    Report& report = run_.report;
    report_engine(weights, state, memory);
    const std::int64_t trained = last_.step - begin_;
    out << fmt::format("trained {} steps{} in {}: ", trained,
                       begin_ > 0 ? fmt::format(", to step {},", last_.step) : "", format_duration(seconds));
    if (trained > 0) out << fmt::format("loss {:.4f}, ", last_.loss);
    for (std::size_t i = 0; i < held_out.size(); ++i) {
      out << fmt::format("{}loss{} {:.4f} over {} tokens", i == 0 ? "validation " : ", ", of_set(held_out[i]),
                         held_out[i].result.loss, held_out[i].result.tokens);
    }
    out << "\n" << best_line();
    out << fmt::format("{}, {:.1f}% of the matmul peak; weights {}\n", format_rate(progress_.mean_rate()),
                       100 * progress_.mean_peak_share(), format_digest(weights));
    if (run_.options.ngrams) {
      const NgramEntropies entropies = run_.ngrams();
      report.set_ngrams(entropies);
      out << fmt::format(
          "held-out nats per byte: bigram {:.4f}, trigram {:.4f}, this model {:.4f} ({:+.4f} to the "
          "bigram)\n",
          entropies.bigram, entropies.trigram, held_out.front().result.loss,
          held_out.front().result.loss - entropies.bigram);
    }
    if (!run_.profile) out << memory_at_peak(run_.runtime->ledger());  // the profile reports it at its end
    out << traffic_line(run_.engine->traffic_report());
    if (!stages.empty() && trained > 0) out << idle_line(stages, run_.runtime->mesh());
    if (run_.settings.config.offload.any()) out << offload_lines();
    if (!sample.empty()) {
      report.set_sample(sample);
      out << "sample of generated text:\n" << sample << "\n";
    }
    write_report();
    if (ended_in_doubt()) {
      run_.output.errors << fmt::format(
          "tranche: the weights may be ruined, because the last loss or gradient was not finite (status {}): "
          "lower the learning rate, or check the data\n",
          static_cast<int>(ExitStatus::numerical));
    }
  }

  std::string best_line() const {
    const std::optional<training::BestCheckpoint>& best = checkpoints_.best();
    if (!best) return {};
    return fmt::format("best checkpoint: {}, with a loss of {:.4f} on {}\n", best->path, best->loss,
                       best->set == "validation" ? "the held-out windows" : best->set);
  }

  static std::string traffic_line(const std::string& traffic) {
    const auto document = nlohmann::json::parse(traffic);
    std::int64_t elements = 0, bytes = 0;
    for (const auto& [operation, count] : document.items()) {
      if (operation == "control" || !count.is_object()) continue;
      elements += count["elements"].get<std::int64_t>();
      bytes += count["bytes"].get<std::int64_t>();
    }
    const auto& formula = document["formula_elements"];
    return fmt::format("traffic of a step and rank: {} elements ({} bytes); {}\n", elements, bytes,
                       formula.is_null() ? "there is no formula for chains (tranche.tensor_sums)"
                                         : "by the formula " + formula.dump());
  }

  std::string offload_lines() const {
    const OffloadTraffic& bytes = last_.offload_traffic;
    std::string text = fmt::format("between tiers in a step, rank 0: {} bytes to the host, {} from it",
                                   bytes.to_host, bytes.from_host);
    if (bytes.nvme_read + bytes.nvme_written > 0) {
      text += fmt::format("; {} read from nvme, {} written", bytes.nvme_read, bytes.nvme_written);
    }
    return text + "\n" + offload_.line() + "\n";
  }

  Run& run_;
  training::StopSignals* signals_;
  Progress progress_;
  OffloadSummary offload_;
  StageTimes stage_times_;
  std::optional<RunTrace> trace_;                   ///< with --trace on several ranks
  std::optional<training::MetricsFile> metrics_;    ///< on rank 0, with --metrics
  std::vector<std::unique_ptr<ScalarLog>> curves_;  ///< on rank 0: `tensorboard` and `csv_monitor`
  training::CheckpointSchedule checkpoints_;
  StepResult last_;
  double processor_before_ = processor_seconds_now();
  std::vector<double> processor_seconds_;  ///< for each step since share_processor_seconds()
  std::int64_t begin_ = 0;                 ///< steps done earlier
};

}  // namespace

int run_train(const Options& options, const Output& output) {
  // The signals are handled before Run starts the launcher's threads.
  std::optional<training::StopSignals> signals;
  if (!options.checkpoint_dir.empty()) signals.emplace();
  Run run(options, output);
  std::optional<int> ended_with;  // by a signal or in doubt
  const int status = run.execute([&] {
    {
      Training training(run, signals ? &*signals : nullptr);
      if (training()) {
        ended_with = static_cast<int>(options.stopped_status.value_or(stopped_by_signal));
      } else if (training.ended_in_doubt()) {
        ended_with = static_cast<int>(ExitStatus::numerical);
      }
    }
    if (!ended_with) return;
    // A launcher kills the other ranks once one exits with a status above 0, so all must be done by then.
    run.lease.reset();
    std::int64_t done = 1;
    run.runtime->all()
        .all_reduce(&done, 1, DataType::int64, ReduceOperation::minimum,
                    {"program", "stopped", Traffic::control})
        .wait();
  });
  return status != 0 ? status : ended_with.value_or(0);
}

}  // namespace tranche::tools
