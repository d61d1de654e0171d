#include "tranche/planner/stage_plans.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "planner/planned_run.h"
#include "tranche/planner/plan_text.h"
#include "tranche/version.h"

namespace tranche::planner {

namespace {

using nlohmann::ordered_json;

std::string heading(std::string_view name, const std::string& value) {
  return fmt::format("  {:<22} {}\n", name, value);
}

std::string count_of(std::int64_t count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

/// The notes of all stages without duplicates.
std::vector<std::string> notes_of_stages(const std::vector<StagePlan>& plans) {
  std::vector<std::string> notes;
  for (const StagePlan& one : plans) {
    for (const std::string& note : one.plan.notes) {
      if (std::find(notes.begin(), notes.end(), note) == notes.end()) notes.push_back(note);
    }
  }
  return notes;
}

std::int64_t peak_of(const StagePlan& one, Tier tier) {
  return one.plan.tier(tier).peak;
}

std::int64_t activations_of(const StagePlan& one) {
  return one.plan.tier(Tier::device).category_peak[Category::activations];
}

}  // namespace

TrafficCount StagePlan::messages() const {
  const auto sent = plan.data.find("send");
  return sent == plan.data.end() ? TrafficCount() : sent->second;
}

std::string StagePlan::name() const {
  const bool stages = plan.mesh.size(MeshAxis::pipeline) > 1, parts = plan.mesh.size(MeshAxis::tensor) > 1;
  return (stages || !parts ? fmt::format("stage {}", stage) : "") + (stages && parts ? ", " : "") +
         (parts ? "tensor " + tensor_text() : "");
}

std::string StagePlan::tensor_text() const {
  std::string text;
  for (std::size_t begin = 0, end = 0; begin < tensors.size(); begin = end) {
    for (end = begin + 1; end < tensors.size() && tensors[end] == tensors[end - 1] + 1;) ++end;
    text += (begin > 0 ? ", " : "") + std::to_string(tensors[begin]);
    if (end > begin + 1) text += "-" + std::to_string(tensors[end - 1]);
  }
  return text;
}

std::vector<StagePlan> plan_stages(const PlanRequest& request, std::int64_t budget, bool other_gathering) {
  const Mesh mesh = request.config.mesh_of(request.ranks);
  std::vector<StagePlan> plans;
  for (int stage = 0; stage < mesh.size(MeshAxis::pipeline); ++stage) {
    const std::vector<int> ranks =
        mesh.group({MeshAxis::tensor}, mesh.group({MeshAxis::pipeline}, 0)[static_cast<std::size_t>(stage)]);
    for (const std::vector<int>& alike : equal_ranks(request, ranks)) {
      StagePlan one{stage, alike, request, {}};
      one.request.rank = ranks[static_cast<std::size_t>(alike.front())];
      one.plan = plan_run(one.request);
      if (other_gathering) one.plan.other_gathering = plan_other_gathering(one.request, one.plan);
      plans.push_back(std::move(one));
    }
  }
  const auto key = [&](const StagePlan& one) {
    const bool short_of_memory = !shortages(one.request, one.plan, budget).empty();
    return std::pair(short_of_memory ? 0 : 1, -peak_of(one, Tier::device));
  };
  std::stable_sort(plans.begin(), plans.end(),
                   [&](const StagePlan& a, const StagePlan& b) { return key(a) < key(b); });
  return plans;
}

std::string stage_plans_text(const std::vector<StagePlan>& plans, std::int64_t budget) {
  const StagePlan& largest = plans.at(0);
  Config config = largest.request.config;
  validate_config(config, largest.request.ranks);
  const auto model = ordered_json::parse(largest.plan.model);
  const bool covered = largest.request.model.covers_activations();
  std::string text = heading("model", fmt::format("{}: {} parameters", largest.request.model.name,
                                                  model["parameters"].get<std::int64_t>()));
  const int stages = largest.plan.mesh.size(MeshAxis::pipeline),
            parts = largest.plan.mesh.size(MeshAxis::tensor);
  text += heading("mesh", fmt::format("{}; one rank of each {}, the largest first (--rank N has all of one)",
                                      largest.plan.mesh.to_string(),
                                      parts == 1    ? "stage"
                                      : stages == 1 ? "class of coordinates on tensor"
                                                    : "stage and class of coordinates on tensor"));
  if (stages > 1) {
    text += heading("pipeline",
                    fmt::format("{}, schedule {}", count_of(stages, "stage"), config.pipeline_schedule));
  }
  text += heading("stage", fmt::format("ZeRO {}, {} reduction", config.stage,
                                       name_of(config.effective_reduction(largest.plan.mesh.state_ranks()))));
  text += heading("batch", config.batch_text(config.data_ranks(largest.request.ranks)));
  text += heading("dtypes", config.dtypes_text());
  if (covered) {
    text += heading("activations", config.activation_checkpointing
                                       ? "checkpointed every " + count_of(config.checkpoint_every, "block")
                                       : "kept");
  }
  for (const std::string& note : notes_of_stages(plans)) text += heading("note", note);

  std::size_t units = 5;
  for (const StagePlan& one : plans) units = std::max(units, one.plan.units.size());
  const auto cell = [&](const auto& of_tensor) {
    return parts > 1 ? fmt::format("{:>13}", of_tensor) : std::string();
  };
  text += fmt::format("\n{:>5}{}{:>7}  {:<{}}{:>13}{:>13}{:>13}{:>13}{:>13}{:>10}{:>13}{}\n", "stage",
                      cell("tensor"), "rank", "units", units, "device peak", "host peak", "nvme peak",
                      "state", "activations", "messages", "bytes a step", cell("over tensor"));
  for (const StagePlan& one : plans) {
    const TrafficCount sent = one.messages();
    const auto over_tensor = one.plan.axes.find(MeshAxis::tensor);
    text += fmt::format(
        "{:>5}{}{:>7}  {:<{}}{:>13}{:>13}{:>13}{:>13}{:>13}{:>10}{:>13}{}\n", one.stage,
        cell(one.tensor_text()), one.request.rank, one.plan.units.empty() ? "all" : one.plan.units, units,
        format_bytes(peak_of(one, Tier::device)), format_bytes(peak_of(one, Tier::host)),
        format_bytes(peak_of(one, Tier::nvme)), format_bytes(one.state_bytes()),
        covered ? format_bytes(activations_of(one)) : std::string("not covered"), sent.calls,
        format_bytes(sent.bytes),
        cell(over_tensor == one.plan.axes.end() ? std::string() : format_bytes(over_tensor->second.bytes)));
  }
  text +=
      beside_what_is_taken(largest.request.host_memory, peak_of(largest, Tier::host),
                           largest.request.device == DeviceKind::cpu ? peak_of(largest, Tier::device) : 0);
  bool fits = true;
  for (const StagePlan& one : plans) {
    for (const std::string& line : shortages(one.request, one.plan, budget)) {
      text += fmt::format("{}{} (rank {}) {}\n", fits ? "\n" : "", one.name(), one.request.rank, line);
      fits = false;
    }
  }
  if (budget > 0 && fits) {
    text += fmt::format("\nfits in {}: {} are left on {}, the largest\n", format_bytes(budget),
                        format_bytes(budget - peak_of(largest, Tier::device)), largest.name());
  }
  return text;
}

std::string stage_plans_json(const std::vector<StagePlan>& plans, std::int64_t budget) {
  const StagePlan& largest = plans.at(0);
  const auto fits = [&](const StagePlan& one) {
    return budget > 0 ? ordered_json(shortages(one.request, one.plan, budget).empty())
                      : ordered_json(nullptr);
  };
  ordered_json document{{"schema", stage_plans_schema},
                        {"version", version},
                        {"model_name", largest.request.model.name},
                        {"world", largest.request.ranks},
                        {"mesh", largest.plan.mesh.to_string()},
                        {"budget_bytes", budget > 0 ? ordered_json(budget) : ordered_json(nullptr)},
                        {"fits", fits(largest)},
                        {"notes", notes_of_stages(plans)}};
  ordered_json& stages = document["stages"] = ordered_json::array();
  for (const StagePlan& one : plans) {
    const TrafficCount sent = one.messages();
    ordered_json peak = ordered_json::object();
    for (const Tier tier : all_tiers) peak[std::string(name_of(tier))] = peak_of(one, tier);
    stages.push_back(
        {{"pipeline", one.stage},
         {"rank", one.request.rank},
         {"units", one.plan.units},
         {"fits", fits(one)},
         {"peak_bytes", std::move(peak)},
         {"state_bytes", one.state_bytes()},
         {"activations_bytes", activations_of(one)},
         {"messages", {{"calls", sent.calls}, {"elements", sent.elements}, {"bytes", sent.bytes}}},
         {"plan", ordered_json::parse(plan_json(one.request, one.plan, budget))}});
    if (largest.plan.mesh.size(MeshAxis::tensor) > 1) {
      stages.back()["tensor"] = one.tensors.front();
      stages.back()["tensors"] = one.tensors;
    }
  }
  return document.dump(1) + "\n";
}

}  // namespace tranche::planner
