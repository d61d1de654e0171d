#include "tools/schedule/schedule_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "core/output_file.h"
#include "core/text_file.h"
#include "pipeline/schedule/certificate.h"
#include "pipeline/schedule/check.h"
#include "pipeline/schedule/load.h"
#include "pipeline/schedule/lower.h"
#include "pipeline/schedule/simulate.h"
#include "pipeline/schedule/text.h"
#include "tools/schedule/chart.h"
#include "tools/schedule/schedule_check.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

using nlohmann::ordered_json;
using pipeline::Certificate;
using pipeline::PipelineSchedule;
using pipeline::RankTimes;
using pipeline::Simulation;
using pipeline::StageTimes;

/// Parses one time for all stages, or one for each.
std::vector<double> read_times(std::string_view text, const char* flag, int stages) {
  constexpr double most = 1e12;
  std::vector<double> times;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    double time = 0;
    const auto [stop, error] = std::from_chars(text.data() + at, text.data() + end, time);
    if (error != std::errc() || stop != text.data() + end || !(time > 0 && time <= most)) {
      throw ConfigurationError(
          fmt::format("{} '{}': '{}' is no time; times are numbers above 0 and at most {:g}", flag, text,
                      text.substr(at, end - at), most));
    }
    times.push_back(time);
    at = end + 1;
  }
  const auto count = static_cast<std::size_t>(stages);
  if (times.size() == 1) times.resize(count, times.front());
  if (times.size() != count) {
    throw ConfigurationError(
        fmt::format("{} '{}' has {} times; there are {} stages: give one for all, or one for each", flag,
                    text, times.size(), stages));
  }
  return times;
}

/// The results of the command, for both forms of output.
struct Result {
  PipelineSchedule schedule;
  StageTimes times;
  Simulation run;
  Certificate certificate;
  std::vector<std::string> notes;
};

Result result_of(const ScheduleOptions& options) {
  Result result;
  result.schedule = pipeline::load_schedule(
      options.source, static_cast<int>(options.stages.value_or(0)), options.micro_batches.value_or(0),
      static_cast<int>(options.chunks.value_or(0)), detail::Pipes::allowed);
  const int stages = result.schedule.stages();
  result.times = {read_times(options.forward, "--f", stages), read_times(options.input, "--i", stages),
                  read_times(options.weight, "--w", stages)};
  // This throws for a schedule that deadlocks, which has no length.
  (void)pipeline::proved(result.schedule, pipeline::MessageModel::async, options.source);
  result.run = pipeline::simulate(result.schedule, result.times);
  result.certificate = pipeline::lower_bounds(result.schedule, result.times);
  if (result.schedule.micro_batches < stages) {
    const std::int64_t most = result.schedule.micro_batches;
    result.notes.push_back(fmt::format(
        "{0} micro-batch{1} on {2} stages of a pipeline: at most {0} of {2} stages can work at once", most,
        most == 1 ? "" : "es", stages));
  }
  return result;
}

/// The excess of the length over the larger bound.
std::string optimality(const Result& result) {
  const double bound = result.certificate.bound(), above = result.run.length / bound - 1;
  constexpr double rounding = 1e-9;
  const std::string bounds = fmt::format("{:.6g} (by rank {:.6g}, by path {:.6g})", bound,
                                         result.certificate.by_rank, result.certificate.by_path);
  return above < rounding ? bounds + ": no other order of these actions is shorter"
                          : bounds + fmt::format(": the schedule is {:.1f} % longer", above * 100);
}

std::string schedule_text(const Result& result, const ScheduleOptions& options) {
  const PipelineSchedule& schedule = result.schedule;
  const auto chunks = static_cast<std::size_t>(schedule.chunks()), stages = schedule.ranks.size();
  std::string text = fmt::format("{}: {} stages, {} micro-batches, {} chunks\n\n", options.source, stages,
                                 schedule.micro_batches, chunks);
  text += chart_text(schedule, result.run);
  text += fmt::format("\n{:>6}{:>12}{:>12}{:>12}{:>12}{:>20}\n", "rank", "busy", "start-up", "bubble",
                      "cool-down", "peak activations");
  double busy = 0;
  for (std::size_t rank = 0; rank < stages; ++rank) {
    const RankTimes& times = result.run.ranks[rank];
    busy += times.busy;
    text += fmt::format("{:>6}{:>12.6g}{:>12.6g}{:>12.6g}{:>12.6g}{:>20}\n", rank, times.busy, times.start_up,
                        times.bubble, times.cool_down, result.run.peak_activations[rank]);
  }
  text += fmt::format("\nlength       {:.6g}\nutilization  {:.1f} % ({:.6g} of {:.6g})\nlower bound  {}\n",
                      result.run.length, result.run.utilization * 100, busy,
                      result.run.length * static_cast<double>(stages), optimality(result));
  if (pipeline::has_gathers(schedule))
    text += fmt::format("gathers      {}\n", pipeline::gathers_of(schedule));
  return text;
}

std::string schedule_json(const Result& result, const ScheduleOptions& options) {
  ordered_json ranks = ordered_json::array();
  for (const RankTimes& times : result.run.ranks) {
    ranks.push_back({{"busy", times.busy},
                     {"start_up", times.start_up},
                     {"bubble", times.bubble},
                     {"cool_down", times.cool_down}});
  }
  const ordered_json json = {
      {"schema", schedule_schema},
      {"schedule", options.source},
      {"stages", result.schedule.stages()},
      {"micro_batches", result.schedule.micro_batches},
      {"rank_of_chunk", result.schedule.rank_of_chunk},
      {"times",
       {{"forward", result.times.forward}, {"input", result.times.input}, {"weight", result.times.weight}}},
      {"length", result.run.length},
      {"utilization", result.run.utilization},
      {"peak_activations", result.run.peak_activations},
      {"lower_bound", result.certificate.bound()},
      {"lower_bound_by_rank", result.certificate.by_rank},
      {"lower_bound_by_path", result.certificate.by_path},
      {"gathers", pipeline::gathers_of(result.schedule)},
      {"ranks", ranks},
      {"notes", result.notes}};
  // A path may hold bytes that are not UTF-8.
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

void write_text(const Result& result, const ScheduleOptions& options) {
  if (options.write.empty()) return;
  const PipelineSchedule written =
      options.messages ? pipeline::with_messages(result.schedule) : result.schedule;
  try {
    detail::write_output_file(options.write, pipeline::write_schedule(written));
  } catch (const IoError& problem) {
    throw ConfigurationError(fmt::format("--write {}", problem.message()));
  }
}

}  // namespace

int run_schedule(const Options& all_options, const Output& output) {
  const ScheduleOptions& options = all_options.schedule;
  if (options.check.used) return run_schedule_check(all_options, output);
  Launch launch(output.errors, all_options.flags);
  return launch.agree([&] {
    const Result result = result_of(options);
    if (launch.rank() != 0) return;
    write_text(result, options);
    for (const std::string& note : result.notes) output.errors << "note: " << note << "\n";
    output.out << (options.json ? schedule_json(result, options) : schedule_text(result, options))
               << std::flush;
  });
}

}  // namespace tranche::tools
