#include "tranche/planner/schedule_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <tuple>

#include "engine/pipeline_order.h"
#include "engine/stages.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/simulate.h"
#include "tranche/core/error.h"
#include "tranche/planner/plan_text.h"
#include "tranche/planner/projection_text.h"

namespace tranche::planner {

namespace {

/// Fills in the length and idle time of the idealised step.
void simulate(ScheduleChoice& choice, const PlanRequest& request) {
  Config config = request.config;
  validate_config(config, request.ranks);
  const int stages = config.mesh_of(request.ranks).size(MeshAxis::pipeline);
  const ModelSpec model = request.model.spec(request.model.sequence_or_longest(request.sequence));
  const detail::Stages cut = detail::divide(model, config, stages);
  pipeline::StageTimes times = pipeline::StageTimes::equal(stages, 0, 0, 0);
  double all = 0;
  for (int chunk = 0; chunk < cut.chunks(); ++chunk) {
    for (int use = cut.begin(chunk); use < cut.end(model, chunk); ++use) {
      const double operations = model.forward[static_cast<std::size_t>(use)].operations;
      times.forward[static_cast<std::size_t>(cut.stage_of(chunk))] += operations;
      all += operations;
    }
  }
  for (std::size_t stage = 0; stage < times.forward.size(); ++stage) {
    if (all > 0) times.forward[stage] *= stages / all;
    times.weight[stage] = times.forward[stage];
    times.input[stage] = times.forward[stage] * (config.activation_checkpointing ? 2 : 1);
  }
  const pipeline::Simulation run = pipeline::simulate(detail::schedule_of(config, stages), times);
  choice.chunks = cut.chunks() / stages;
  choice.length = run.length;
  choice.idle = 1 - run.utilization;
}

void take_memory(ScheduleChoice& choice, const std::vector<StagePlan>& plans, std::int64_t budget) {
  for (const StagePlan& one : plans) {
    choice.peak = std::max(choice.peak, one.plan.tier(Tier::device).peak);
    choice.fits = choice.fits && shortages(one.request, one.plan, budget).empty();
  }
}

}  // namespace

std::vector<ScheduleChoice> schedule_choices(const PlanRequest& request, const std::vector<StagePlan>& plans,
                                             std::int64_t budget,
                                             const std::function<double(const PlanRequest&)>& seconds) {
  std::vector<ScheduleChoice> choices;
  if (request.config.mesh_of(request.ranks).size(MeshAxis::pipeline) == 1) return choices;
  ScheduleChoice own{.name = request.config.pipeline_schedule};
  simulate(own, request);
  take_memory(own, plans, budget);
  if (seconds) own.seconds = seconds(request);
  choices.push_back(std::move(own));
  for (const pipeline::NamedSchedule& named : pipeline::named_schedules()) {
    if (named.name == request.config.pipeline_schedule) continue;
    PlanRequest other = request;
    other.config.pipeline_schedule = named.name;
    if (!named.any_chunks) other.config.pipeline_chunks = 0;
    ScheduleChoice choice{.name = std::string(named.name)};
    try {
      simulate(choice, other);
      take_memory(choice, plan_stages(other, budget), budget);
      if (seconds) choice.seconds = seconds(other);
    } catch (const ConfigurationError& error) {
      // The schedule does not allow the request's number of micro-batches, chunks or cuts.
      choice.refused = error.message();
    }
    choices.push_back(std::move(choice));
  }
  std::stable_sort(choices.begin(), choices.end(), [](const ScheduleChoice& a, const ScheduleChoice& b) {
    return std::tuple(!a.refused.empty(), !a.fits, a.seconds.value_or(a.length), a.peak) <
           std::tuple(!b.refused.empty(), !b.fits, b.seconds.value_or(b.length), b.peak);
  });
  return choices;
}

std::string schedule_choices_text(const std::vector<ScheduleChoice>& choices) {
  if (choices.empty()) return {};
  std::size_t name = 8;
  for (const ScheduleChoice& one : choices) name = std::max(name, one.name.size());
  const bool timed = std::any_of(choices.begin(), choices.end(),
                                 [](const ScheduleChoice& one) { return one.seconds.has_value(); });
  std::string text = fmt::format("\n{:<{}}{:>8}{:>10}{:>8}{:>14}{}\n", "schedule", name, "chunks", "length",
                                 "idle", "device peak", timed ? "      projected" : "");
  for (const ScheduleChoice& one : choices) {
    if (!one.refused.empty()) {
      text += fmt::format("{:<{}}  not here: {}\n", one.name, name, one.refused);
      continue;
    }
    text += fmt::format("{:<{}}{:>8}{:>10.2f}{:>6.1f} %{:>14}{}{}\n", one.name, name, one.chunks, one.length,
                        100 * one.idle, format_bytes(one.peak),
                        one.seconds ? fmt::format("{:>15}", seconds_text(*one.seconds)) : "",
                        one.fits ? "" : "  does not fit");
  }
  return text +
         fmt::format(
             "length: forward passes of a mean stage, by operations alone; idle: of all ranks' time{}; the "
             "shortest that fits stands first\n",
             timed ? "; projected: a step on the machine" : "");
}

std::string with_schedules(const std::string& stage_plans_json, const std::vector<ScheduleChoice>& choices) {
  using nlohmann::ordered_json;
  ordered_json document = ordered_json::parse(stage_plans_json);
  ordered_json& schedules = document["schedules"] = ordered_json::array();
  for (const ScheduleChoice& one : choices) {
    if (one.refused.empty()) {
      schedules.push_back({{"schedule", one.name},
                           {"chunks", one.chunks},
                           {"length", one.length},
                           {"idle", one.idle},
                           {"peak_bytes", one.peak},
                           {"fits", one.fits}});
      if (one.seconds) schedules.back()["step_seconds"] = *one.seconds;
    } else {
      schedules.push_back({{"schedule", one.name}, {"refused", one.refused}});
    }
  }
  return document.dump(1) + "\n";
}

}  // namespace tranche::planner
