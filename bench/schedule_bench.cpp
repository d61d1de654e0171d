// The time in which a pipeline's schedule is read and checked. See bench_schedule --help.
#include <fmt/core.h>

#include <string>
#include <vector>

#include "bench/figures.h"
#include "bench/flags.h"
#include "pipeline/schedule/check.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/lower.h"
#include "pipeline/schedule/text.h"
#include "tranche/core/error.h"

namespace tranche::bench {

namespace {

struct Settings {
  std::string schedule = "zb-v", model = "channels";
  int stages = 8, chunks = 0;
  std::int64_t micro_batches = 1000, rounds = 5;
};

void measure(const Settings& settings) {
  using namespace pipeline;
  const MessageModel model = message_model_named(settings.model);
  const std::string text = write_schedule(
      with_messages(generate(settings.schedule, settings.stages, settings.micro_batches, settings.chunks)));
  std::vector<double> read_ms, check_ms;
  std::size_t actions = 0;
  for (std::int64_t round = 0; round < settings.rounds; ++round) {
    const Seconds start = clocks_now();
    const PipelineSchedule schedule = read_schedule(text, settings.schedule);
    const Seconds read = clocks_now();
    const Verdict verdict = check(schedule, model, settings.schedule);
    const Seconds checked = clocks_now();
    if (!verdict.accepted()) throw ConfigurationError(verdict.refusal);
    read_ms.push_back(1e3 * (read - start).wall);
    check_ms.push_back(1e3 * (checked - read).wall);
    actions = 0;
    for (const std::vector<Action>& line : schedule.ranks) actions += line.size();
  }
  fmt::print("schedule={} stages={} micro_batches={} model={} actions={} read_ms={:.1f} check_ms={:.1f}\n",
             settings.schedule, settings.stages, settings.micro_batches, settings.model, actions,
             median(read_ms), median(check_ms));
}

}  // namespace

}  // namespace tranche::bench

int main(int argc, char** argv) {
  using namespace tranche::bench;
  return run_program("bench_schedule", [&] {
    Settings settings;
    parse_flags(
        argc, argv,
        {text_flag("--schedule", settings.schedule), text_flag("--model", settings.model),
         number_flag("--stages", settings.stages), number_flag("--chunks", settings.chunks),
         number_flag("--micro-batches", settings.micro_batches), number_flag("--rounds", settings.rounds)});
    measure(settings);
  });
}
