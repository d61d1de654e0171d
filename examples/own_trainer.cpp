// This program is a training loop that uses the same library parts as `tranche train`: batches from a text
// file, evaluation, a metrics file, a save when a signal ends the run, and checkpoints, of which it keeps the
// last two and the best. The same command starts a run and continues it, on any number of ranks.
//
//   own_trainer TEXT FOLDER [STEPS]
#include <tranche/models/gpt.h>
#include <tranche/training/checkpoint_schedule.h>
#include <tranche/training/evaluation.h>
#include <tranche/training/metrics.h>
#include <tranche/training/stop_signals.h>
#include <tranche/tranche.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
using namespace tranche;

/// Returns true if a signal ended the run before its last step.
static bool train(const std::string& text, const std::string& folder, std::int64_t steps) {
  training::StopSignals signals;  // before anything starts a thread
  Runtime runtime = Runtime::from_config(R"({"train_batch_size": 4, "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3}, "tranche": {"threads": 1}})");
  const bool root = runtime.rank() == 0;
  const models::Gpt gpt(models::GptConfig::preset("gpt-nano"));
  const std::int64_t sequence = 32;

  const training::TokenFile file(text);
  const std::int64_t held_out = file.size() / 10;
  const training::Windows training({&file, 0, file.size() - held_out}, sequence, "training");
  const training::Windows validation({&file, file.size() - held_out, held_out}, sequence, "validation");
  const training::Mixture order({{text, training.count(), 1}}, runtime.config().seed);
  const std::vector<std::int64_t> evaluated = training::evaluation_windows(validation.count(), 16);

  Engine engine(runtime, models::Gpt::spec(gpt.config(), sequence), runtime.config());
  const std::int64_t accumulation = engine.config().accumulation_steps;
  training::BatchFeeder feeder(engine, gpt.config().vocabulary,
                               {engine.config().micro_batch_size, accumulation, runtime.mesh().data_ranks()},
                               sequence);
  if (std::filesystem::exists(folder + "/latest")) engine.load(folder);

  training::CheckpointScheduleOptions kept;
  kept.folder = folder;
  kept.every = 5;
  kept.keep_last = 2;
  kept.keep_best = "text";
  training::CheckpointSchedule checkpoints(
      engine, kept, [&](const training::CompletedCheckpoint& checkpoint) {
        if (root) std::printf("%s%s\n", checkpoint.path.c_str(), checkpoint.best ? " (best)" : "");
      });
  std::optional<training::MetricsFile> metrics;
  if (root) {
    std::filesystem::create_directories(folder);
    metrics.emplace(folder + "/metrics.jsonl", engine.steps());
  }
  const auto note = [&](const std::string& line) {
    if (!root) return;
    const std::string problem = metrics->add(line);
    if (!problem.empty()) std::fprintf(stderr, "%s\n", problem.c_str());
  };

  bool stopped = false;
  while (engine.steps() < steps && !stopped) {
    models::train_step(gpt, engine,
                       [&](std::int64_t m) { return feeder.training_batch(training, order, m); });
    if (signals.poll() != 0) engine.request_stop();  // on any rank; all ranks then stop after this step
    const StepResult result = engine.step();
    stopped = result.stop_requested;
    if (stopped) signals.keep_until_exit();  // this program exits then; a batch system may repeat its signal
    const bool evaluates = result.step % 10 == 0;
    note(training::step_line(result));
    checkpoints.after_step(result, evaluates);
    if (!evaluates) continue;
    const EvaluationResult loss = training::evaluate_windows(engine, gpt, feeder, validation, evaluated);
    note(training::validation_line(result.step, loss, "text"));
    checkpoints.evaluated({{"text", loss}});
  }
  checkpoints.save();
  checkpoints.finish();
  if (!root) return stopped;
  std::printf("step %lld", static_cast<long long>(engine.steps()));
  if (const auto& best = checkpoints.best()) {
    std::printf(", best %lld with %.4f", static_cast<long long>(best->step), best->loss);
  }
  std::printf("\n");
  std::fflush(stdout);  // a launcher ends this rank once another has ended with a status above 0
  return stopped;
}

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: own_trainer TEXT FOLDER [STEPS]\n");
    return 2;
  }
  try {
    // Status 9, as of tranche train, tells a batch script to continue the run.
    return train(argv[1], argv[2], argc > 3 ? std::atoll(argv[3]) : 100) ? 9 : 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
