#include "tranche/planner/mesh_search_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "tranche/planner/host_memory.h"
#include "tranche/planner/plan_text.h"

namespace tranche::planner {

namespace {

using nlohmann::ordered_json;

std::string search_row(const std::string& name, const std::string& value) {
  return fmt::format("  {:<26} {}\n", name, value);
}

std::string count_row(const std::string& name, std::int64_t count, const std::string& why) {
  if (count == 0) return {};
  return fmt::format("  {:<26} {:>12}  {}\n", name, count, why);
}

std::string peaks_text(const MeshTrial& one) {
  std::string text = format_bytes(one.trial.peak);
  if (one.trial.host > 0) text += fmt::format(" and {} of host memory", format_bytes(one.trial.host));
  if (one.trial.nvme > 0) text += fmt::format(" and {} on nvme", format_bytes(one.trial.nvme));
  return text;
}

/// The parts that make up the seconds of a step.
std::string parts_text(const StepCost& cost) {
  return fmt::format("{:.3g} computing, {:.3g} again, {:.3g} waiting for other ranks, {:.3g} for offload",
                     cost.compute, cost.recompute, cost.exposed, cost.offload);
}

std::string seconds_of(const MeshSearchRequest& request) {
  const CostModel& rates = request.fit.rates;
  if (request.machine) {
    return fmt::format(
        "by a formula with the rates of {}, and the best of each mesh, stage and schedule by its "
        "simulation",
        request.machine->machine.name);
  }
  return fmt::format(
      "by a formula: a rank sends {}/s and computes {:.3g}e12 operations/s; without a machine "
      "file (--machine) all links are taken to be alike",
      format_bytes(static_cast<std::int64_t>(rates.network)), rates.operations / 1e12);
}

std::string why_text(const MeshSearchRequest& request, const MeshSearchResult& result) {
  const StepCost& cost = result.chosen.trial.cost;
  std::string text = fmt::format("the fastest that fits: {:.3g} s a step", result.chosen.seconds);
  if (request.machine) {
    // MeshCandidates::projected() simulates a rank without its pipeline.
    const bool in_stages = result.config.mesh_of(request.fit.plan.ranks).size(MeshAxis::pipeline) > 1;
    text +=
        fmt::format(" {}; {:.3g} by formula",
                    in_stages ? "by its stage's simulation and the schedule's formula" : "in the simulation",
                    cost.total());
  }
  text += fmt::format(" ({})", parts_text(cost));
  // Later entries were planned only to find the next best.
  const auto end =
      result.planned.begin() + std::min<std::int64_t>(result.counts.planned, std::ssize(result.planned));
  const auto faster = std::count_if(result.planned.begin(), end, [&](const MeshTrial& one) {
    return one.missing > 0 && one.trial.cost.total() < cost.total();
  });
  if (faster > 0) {
    text += fmt::format("; {} that {} run and would be faster {} memory", faster,
                        faster == 1 ? "was" : "were", faster == 1 ? "lacks" : "lack");
  }
  return text;
}

/// For example "11 % slower, 3.20 GiB less".
std::string beside_choice(const MeshSearchResult& result, const MeshTrial& one, bool by_formula) {
  const double choice = by_formula ? result.chosen.trial.cost.total() : result.chosen.seconds;
  const double seconds = by_formula ? one.trial.cost.total() : one.seconds;
  const double percent = 100 * (seconds / choice - 1);
  return fmt::format("{:.1f} % {}", percent < 0 ? -percent : percent, percent < 0 ? "faster" : "slower");
}

/// The largest part of the memory of a configuration that does not fit, and settings that would need less.
std::string room_text(const MeshSearchRequest& request, const MeshSearchResult& result) {
  const FitRequest& fit = request.fit;
  const TierAccount& device = result.plan.tier(Tier::device);
  const std::int64_t state = device.at_peak[Category::parameters] + device.at_peak[Category::gradients] +
                             device.at_peak[Category::optimizer] + device.at_peak[Category::gathered];
  const std::int64_t activations = device.at_peak[Category::activations];
  std::string text;
  if (device.peak > fit.budget) text = fmt::format("--fit {} or more", format_bytes(device.peak));
  const auto beside = [&](Tier tier, std::int64_t limit, const char* of) {
    const std::int64_t peak = result.plan.tier(tier).peak;
    if (limit == 0 || peak <= limit) return;
    text += fmt::format("{}{} or more of {} a rank", text.empty() ? "" : ", and ", format_bytes(peak), of);
  };
  beside(Tier::host, fit.plan.host_memory.bytes, "host memory (--host-memory)");
  beside(Tier::nvme, fit.nvme_budget, "nvme (--nvme-space)");
  if (activations > state) {
    text += fmt::format("; activations are {} of it: a shorter --sequence", format_bytes(activations));
    return text;
  }
  text += fmt::format("; parameters, gradients and optimizer state are {} of it: more --ranks",
                      format_bytes(state));
  if (fit.plan.config.offload.nvme_path.empty()) text += ", a disk for state (--nvme-path)";
  if (!fit.plan.config.lora.any()) text += ", or adapters in place of whole weights (tranche.lora)";
  return text;
}

ordered_json trial_json(const MeshTrial& one) {
  return {{"mesh", one.mesh},
          {"schedule", one.schedule.empty() ? ordered_json(nullptr) : ordered_json(one.schedule)},
          {"stage", one.trial.stage},
          {"reduction", name_of(one.trial.reduction)},
          {"checkpoint_every", one.trial.checkpoint_every},
          {"vocabulary_chunk", one.trial.vocabulary_chunk},
          {"micro_batch", one.trial.micro_batch},
          {"accumulation", one.trial.accumulation},
          {"offload_optimizer", name_of(one.trial.optimizer)},
          {"offload_param", name_of(one.trial.parameters)},
          {"offload_activations", one.trial.activations},
          {"peak_bytes", one.trial.peak},
          {"host_bytes", one.trial.host},
          {"nvme_bytes", one.trial.nvme},
          {"host_state_bytes", std::max<std::int64_t>(one.trial.host_state, 0)},
          {"missing_bytes", one.missing},
          {"seconds", one.seconds},
          {"formula_seconds", one.trial.cost.total()}};
}

}  // namespace

std::string describe(const MeshTrial& one) {
  return fmt::format("{}{}, {}", one.mesh, one.schedule.empty() ? "" : ", schedule " + one.schedule,
                     describe(one.trial));
}

std::string mesh_search_text(const MeshSearchRequest& request, const MeshSearchResult& result,
                             const std::string& command) {
  const FitRequest& fit = request.fit;
  const SearchCounts& counts = result.counts;
  const auto refused = std::count_if(result.meshes.begin(), result.meshes.end(), [](const SearchedMesh& one) {
    return one.verdict != "chosen" && one.verdict != "fits" && one.verdict != "slower" &&
           one.verdict != "does not fit";
  });
  std::string text =
      fmt::format("search of {} meshes of {} ranks{} within {}\n", result.meshes.size(), fit.plan.ranks,
                  request.axes.empty() ? "" : " with " + request.axes, format_bytes(fit.budget));
  text += search_row("seconds", seconds_of(request));
  text += search_row("host memory", describe(fit.plan.host_memory));
  text +=
      count_row("configurations", counts.all,
                "meshes x stages x reductions x schedules x checkpointing x heads x tiers x micro-batches");
  text += count_row("  by state", counts.by_state, "the state alone is more than the budget");
  text += count_row("  by activations", counts.by_activations,
                    "with the activations that a plan of equal stages had");
  text += count_row("  by the micro-batch", counts.by_micro_batch, "a smaller one does not fit");
  text += count_row("  by time", counts.by_time, "they take at least as long as the choice");
  text += count_row("  refused", counts.refused, "a run would not start");
  text += count_row(
      "  run", counts.planned,
      "on the meta device" +
          (counts.projected > 0 ? fmt::format("; {} of them simulated", counts.projected) : std::string()));
  if (refused > 0) {
    const auto first = std::find_if(result.meshes.begin(), result.meshes.end(), [](const SearchedMesh& one) {
      return one.verdict != "chosen" && one.verdict != "fits" && one.verdict != "slower" &&
             one.verdict != "does not fit";
    });
    text += fmt::format("  {} of the meshes cannot be used; {}: {}\n", refused, first->mesh, first->verdict);
  }
  if (!result.fits) {
    text += fmt::format("\nnothing fits in {}: {} comes closest: it takes {}, {} more than is available\n",
                        format_bytes(fit.budget), describe(result.chosen), peaks_text(result.chosen),
                        format_bytes(result.chosen.missing));
    return text + search_row("what would make room", room_text(request, result)) + "\n";
  }
  text += "\n";
  text += search_row("choice", describe(result.chosen));
  text += search_row("why", why_text(request, result));
  text += search_row("device memory", fmt::format("{}; {} are left", peaks_text(result.chosen),
                                                  format_bytes(fit.budget - result.chosen.trial.peak)));
  if (result.less_memory) {
    const MeshTrial& one = *result.less_memory;
    text += search_row("next best on less memory",
                       fmt::format("{}: {}, {:.3g} s a step, {}", describe(one), peaks_text(one), one.seconds,
                                   beside_choice(result, one, false)));
  }
  if (result.less_time) {
    const MeshTrial& one = *result.less_time;
    text += search_row(
        "next best on less time",
        fmt::format("{}: lacks {}, {:.3g} s a step by formula, {}", describe(one), format_bytes(one.missing),
                    one.trial.cost.total(), beside_choice(result, one, true)));
  }
  return text + search_row("to run it", command) + "\n";
}

std::string with_search(const std::string& plan, const MeshSearchRequest& request,
                        const MeshSearchResult& result, const std::string& command) {
  ordered_json document = ordered_json::parse(plan);
  const SearchCounts& counts = result.counts;
  const auto or_null = [](const std::optional<MeshTrial>& one) {
    return one ? trial_json(*one) : ordered_json(nullptr);
  };
  ordered_json meshes = ordered_json::array(), planned = ordered_json::array();
  for (const SearchedMesh& one : result.meshes) {
    meshes.push_back({{"mesh", one.mesh}, {"verdict", one.verdict}, {"best", or_null(one.best)}});
  }
  for (const MeshTrial& one : result.planned) planned.push_back(trial_json(one));
  document["search"] = {
      {"axes", request.axes},
      {"machine", request.machine ? ordered_json(request.machine->machine.name) : ordered_json(nullptr)},
      {"budget_bytes", request.fit.budget},
      {"fits", result.fits},
      {result.fits ? "chosen" : "nearest", trial_json(result.chosen)},
      {"what_would_make_room",
       result.fits ? ordered_json(nullptr) : ordered_json(room_text(request, result))},
      {"less_memory", or_null(result.less_memory)},
      {"less_time", or_null(result.less_time)},
      {"command", result.fits ? ordered_json(command) : ordered_json(nullptr)},
      {"configurations",
       {{"all", counts.all},
        {"by_state", counts.by_state},
        {"by_activations", counts.by_activations},
        {"by_micro_batch", counts.by_micro_batch},
        {"by_time", counts.by_time},
        {"refused", counts.refused},
        {"planned", counts.planned},
        {"projected", counts.projected}}},
      {"meshes", std::move(meshes)},
      {"planned", std::move(planned)}};
  return document.dump(1) + "\n";
}

}  // namespace tranche::planner
