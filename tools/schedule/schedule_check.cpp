#include "tools/schedule/schedule_check.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "core/text_file.h"
#include "pipeline/schedule/check.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/load.h"
#include "pipeline/schedule/lower.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

using nlohmann::ordered_json;
using pipeline::Held;
using pipeline::PipelineSchedule;
using pipeline::Verdict;

struct Checked {
  PipelineSchedule schedule;  ///< with its messages
  Verdict verdict;
  std::vector<std::string> notes;
};

Checked checked(const ScheduleCheckOptions& options) {
  Checked result;
  const PipelineSchedule given =
      pipeline::load_schedule(options.source, static_cast<int>(options.stages), options.micro_batches,
                              static_cast<int>(options.chunks), detail::Pipes::allowed);
  result.schedule = pipeline::with_messages(given);
  if (result.schedule != given && pipeline::find_schedule(options.source) == nullptr) {
    result.notes.push_back(
        fmt::format("{} has no messages; what a run would do is checked: a receive before each action that "
                    "reads a message, and a send after the action that makes it",
                    options.source));
  }
  result.verdict = pipeline::check(result.schedule, pipeline::message_model_named(options.model),
                                   options.source, {options.activations, options.buffers, options.gathered});
  return result;
}

std::string accepted_text(const Checked& result, const ScheduleCheckOptions& options) {
  const PipelineSchedule& schedule = result.schedule;
  std::size_t actions = 0;
  for (const auto& line : schedule.ranks) actions += line.size();
  std::string text = fmt::format(
      "{}: complete, causal and free of deadlock (model {}); weight gradients ascend\n"
      "{} stages, {} micro-batches, {} chunks, {} actions\n\n{:>6}{:>20}{:>20}{:>20}\n",
      options.source, options.model, schedule.stages(), schedule.micro_batches, schedule.chunks(), actions,
      "rank", "peak activations", "received messages", "gathered chunks");
  for (std::size_t rank = 0; rank < result.verdict.most.size(); ++rank) {
    const Held& most = result.verdict.most[rank];
    text += fmt::format("{:>6}{:>20}{:>20}{:>20}\n", rank, most.activations, most.buffers, most.gathered);
  }
  return text;
}

std::string verdict_json(const Checked& result, const ScheduleCheckOptions& options) {
  ordered_json cycle = ordered_json::array(), ranks = ordered_json::array();
  for (const pipeline::RankAction& one : result.verdict.cycle) {
    cycle.push_back({{"rank", one.rank}, {"action", one.action.name()}});
  }
  for (const Held& most : result.verdict.most) {
    ranks.push_back({{"peak_activations", most.activations},
                     {"received_messages", most.buffers},
                     {"gathered_chunks", most.gathered}});
  }
  const ordered_json json = {{"schema", schedule_check_schema},
                             {"schedule", options.source},
                             {"model", options.model},
                             {"stages", result.schedule.stages()},
                             {"micro_batches", result.schedule.micro_batches},
                             {"rank_of_chunk", result.schedule.rank_of_chunk},
                             {"accepted", result.verdict.accepted()},
                             {"refusal", result.verdict.refusal},
                             {"cycle", cycle},
                             {"ranks", ranks},
                             {"notes", result.notes}};
  // A path may hold bytes that are not UTF-8.
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace

int run_schedule_check(const Options& all_options, const Output& output) {
  const ScheduleCheckOptions& options = all_options.schedule.check;
  Launch launch(output.errors, all_options.flags);
  Checked result;
  const int failed = launch.agree([&] {
    result = checked(options);
    if (!options.json && !result.verdict.accepted()) throw ConfigurationError(result.verdict.refusal);
  });
  if (failed != 0) return failed;
  if (launch.rank() == 0) {
    for (const std::string& note : result.notes) output.errors << "note: " << note << "\n";
    output.out << (options.json ? verdict_json(result, options) : accepted_text(result, options))
               << std::flush;
  }
  return static_cast<int>(result.verdict.accepted() ? ExitStatus::success : ExitStatus::configuration);
}

}  // namespace tranche::tools
