#include "tools/scale/scale_results.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "core/json_node.h"
#include "tranche/core/error.h"

namespace tranche::tools {

using detail::JsonNode;

namespace {

const PointResult* find_point(const std::vector<PointResult>& points, const PointKey& key) {
  for (const PointResult& point : points) {
    if (point.plan.key() == key) return &point;
  }
  return nullptr;
}

/// Computes value(run, run of the base) over the repeats that both have.
template <typename Value>
std::optional<Spread> within_repeats(const PointResult& point, const PointResult& base, const Value& value) {
  std::vector<double> values;
  for (const RunFigures& run : point.runs) {
    for (const RunFigures& other : base.runs) {
      if (run.repeat == other.repeat) values.push_back(value(run, other));
    }
  }
  if (values.empty()) return std::nullopt;
  return spread_of(values);
}

bool is_oversubscribed(const StudyFacts& facts, const RunFigures& run) {
  // A rank that its launcher bound sees only its own cores.
  const int cores = facts.launcher_binds ? run.node_cores : run.cores;
  return run.ranks_on_node * run.threads > cores;
}

}  // namespace

std::string PointKey::text() const {
  return fmt::format("{} rank{}, stage {}{}{}", ranks, ranks == 1 ? "" : "s", stage,
                     mesh.empty() ? "" : ", mesh " + mesh, schedule.empty() ? "" : ", schedule " + schedule);
}

std::string StudyFacts::variant(const std::string& mesh, const std::string& schedule) const {
  const bool by_mesh = meshes.size() > 1, by_schedule = schedules.size() > 1;
  if (by_schedule && schedule.empty()) return by_mesh ? mesh : "no pipeline";
  return (by_mesh ? mesh : "") + (by_mesh && by_schedule ? ", " : "") + (by_schedule ? schedule : "");
}

std::vector<std::string> StudyFacts::variants() const {
  std::vector<std::string> list;
  for (const std::string& mesh : meshes) {
    const bool some = std::any_of(without_pipeline.begin(), without_pipeline.end(),
                                  [&](const auto& one) { return one.second == mesh; });
    const bool all = std::all_of(ranks.begin(), ranks.end(), [&](int of) {
      return without_pipeline.contains({of, mesh});
    });
    if (some) list.push_back(variant(mesh, ""));
    if (some && all) continue;
    for (const std::string& schedule : schedules) list.push_back(variant(mesh, schedule));
  }
  return list;
}

std::vector<std::string> StudyFacts::schedules_at(int of_ranks, const std::string& mesh) const {
  return without_pipeline.contains({of_ranks, mesh}) ? std::vector<std::string>{""} : schedules;
}

std::vector<std::pair<PointKey, PointPlan>> StudyFacts::plans_in_order() const {
  std::vector<std::pair<PointKey, PointPlan>> list;
  for (const int of_ranks : ranks) {
    for (const int stage : stages) {
      for (const std::string& mesh : meshes) {
        for (const std::string& schedule : schedules_at(of_ranks, mesh)) {
          const PointKey key{of_ranks, stage, mesh, schedule};
          list.emplace_back(key, plans.at(key));
        }
      }
    }
  }
  return list;
}

double RunFigures::peak_share(double peak) const {
  return peak > 0 ? tokens_per_second * flops_per_token / peak : 0;
}

RunFigures figures_of(const std::string& report, std::int64_t warmup) {
  const JsonNode document = JsonNode::read<Error>(report, "a report (docs/reference/report.md)");
  RunFigures run;
  run.ranks = document["world"].integer<int>();
  run.stage = document["stage"].integer<int>();
  if (const JsonNode mesh = document["mesh"]) run.mesh = mesh["axes"].text();
  const JsonNode schedule = document["config"]["tranche"]["pipeline_schedule"];
  run.schedule = schedule ? schedule.text() : "1f1b";  // the default is not written
  const std::vector<JsonNode> steps = document["steps"].items();
  double tokens = 0, seconds = 0, processor = 0, timed = 0;
  for (std::size_t i = static_cast<std::size_t>(warmup); i < steps.size(); ++i) {
    const auto number = [&](const char* key) { return steps[i][key].number(); };
    const double own = number("seconds"), between = number("between_seconds");
    timed += 1;
    tokens += number("positions");
    seconds += own + between;
    processor += number("cpu_seconds");
    run.step.gather += number("exposed_gather_seconds");
    run.step.reduce += number("exposed_reduce_seconds");
    run.step.messages += number("exposed_message_seconds");
    run.step.update += number("update_seconds");
    run.step.other += number("exposed_offload_seconds") + between;
  }
  if (timed == 0 || !(seconds > 0)) {
    throw Error(
        fmt::format("a report of {} steps, of which none is behind {} of warm-up", steps.size(), warmup));
  }
  for (double* part :
       {&run.step.gather, &run.step.reduce, &run.step.messages, &run.step.update, &run.step.other}) {
    *part /= timed;
  }
  // Waits of the update itself are counted twice, so the remainder is clamped to 0.
  run.step.compute = std::max(0.0, seconds / timed - run.step.seconds());
  run.tokens_per_step = tokens / timed;
  run.tokens_per_second = tokens / seconds;
  run.cpu_seconds_per_token = tokens > 0 ? processor / tokens : 0;

  const JsonNode traffic = document["traffic"];
  for (const auto& [operation, count] : traffic.members()) {
    if (operation == "control" || !count.json().is_object()) continue;
    run.elements += count["elements"].integer();
    run.bytes += count["bytes"].integer();
  }
  if (!traffic["formula_elements"].json().is_null()) {  // null: chains
    run.formula_elements = traffic["formula_elements"].integer();
    run.formula_bytes = traffic["formula_bytes"].integer();
  }
  const JsonNode memory = document["memory"];
  for (const Tier tier : all_tiers) {
    const JsonNode held = memory[name_of(tier)];
    if (held) run.peak[static_cast<std::size_t>(tier)] = held["peak_bytes"].integer();
  }
  const JsonNode held = memory["device"]["persistent"];
  for (const char* category : {"parameters", "gradients", "optimizer"}) run.state += held[category].integer();
  const JsonNode placement = document["placement"];
  run.ranks_on_node = placement["ranks_on_host"].integer<int>();
  run.threads = placement["threads"].integer<int>();
  run.cores = placement["cores"].integer<int>();
  run.node_cores = placement["host_cores"].integer<int>();
  run.peak_flops = document["matmul_peak_flops"].number_or(0);
  run.flops_per_token = document["model"]["flops_per_token"].number();
  run.weights_digest = document["weights_digest"].text();
  run.fingerprint = document["numerics_fingerprint"].text();
  return run;
}

double state_bytes_per_parameter(int stage, bool boundary, int ranks, int compute, int accumulation,
                                 double master, double moments) {
  const double n = ranks;
  const double parameters = stage >= 3 ? compute / n : compute;
  // Boundary reduction accumulates whole gradients on every rank, at any stage.
  const double gradients = stage == 0 || boundary ? accumulation : accumulation / n;
  const double optimizer = stage == 0 ? master + moments : (master + moments) / n;
  return parameters + gradients + optimizer;
}

std::int64_t formula_state(const planner::PlanResult& plan, const Config& config) {
  const bool shared = config.replicate == Replicate::parameters && config.stage > 0;
  const int replicas = shared ? plan.mesh.size(MeshAxis::replicate) : 1;
  const int compute = static_cast<int>(size_of(config.precision.compute));
  const bool has_master = compute != 4 && config.precision.master != MasterFormat::none;
  const double master = !has_master ? 0 : config.precision.master == MasterFormat::split ? 2 : 4;
  double bytes = 0;
  for (const planner::PlacedState& placed : plan.placed) {
    const int owners = placed.group * replicas;  // the ranks that share gradients and optimizer state
    const bool shards_weights = config.stage == 3 && placed.holders == 1;
    double each = shards_weights ? static_cast<double>(compute) / placed.group : compute;
    if (!placed.frozen) {
      const bool boundary = config.effective_reduction(owners / placed.holders) == ReductionPolicy::boundary;
      each += state_bytes_per_parameter(config.stage, boundary, owners, 0,
                                        static_cast<int>(size_of(config.precision.accumulation)), master,
                                        placed.state_bytes);
    }
    bytes += each * static_cast<double>(placed.elements);
  }
  return std::llround(bytes);
}

Spread spread_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  const double middle = values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
  return {middle, values.front(), values.back()};
}

StudyResults results_of(const StudyFacts& facts, const std::vector<RunFigures>& runs) {
  StudyResults results;
  for (const auto& [key, plan] : facts.plans_in_order()) {
    const int ranks = key.ranks;
    PointResult point;
    point.plan = plan;
    for (const RunFigures& run : runs) {
      if (run.key() == key) point.runs.push_back(run);
    }
    if (point.runs.empty()) continue;
    const auto speeds_below = [](const RunFigures& a, const RunFigures& b) {
      return a.tokens_per_second < b.tokens_per_second;
    };
    std::vector<RunFigures> by_speed = point.runs;
    std::stable_sort(by_speed.begin(), by_speed.end(), speeds_below);
    point.shown = by_speed[(by_speed.size() - 1) / 2];
    std::sort(point.runs.begin(), point.runs.end(),
              [](const RunFigures& a, const RunFigures& b) { return a.repeat < b.repeat; });
    std::vector<double> speeds;
    for (const RunFigures& run : point.runs) {
      speeds.push_back(run.tokens_per_second);
      point.oversubscribed |= is_oversubscribed(facts, run);
    }
    point.tokens_per_second = spread_of(speeds);
    for (const RunFigures& run : runs) {
      if (run.ranks == ranks) point.peak_flops = std::max(point.peak_flops, run.peak_flops);
    }
    results.points.push_back(std::move(point));
  }
  results.runs_wanted = static_cast<std::int64_t>(facts.plans.size()) * facts.repeats;
  results.runs_done = static_cast<std::int64_t>(runs.size());

  const int base = base_ranks(results);
  for (PointResult& point : results.points) {
    PointKey of_base = point.plan.key();
    of_base.ranks = base;
    const PointResult* first = find_point(results.points, of_base);
    of_base.schedule.clear();  // a base without a pipeline is that of every schedule
    if (first == nullptr) first = find_point(results.points, of_base);
    if (first == nullptr) continue;
    point.work_inflation = within_repeats(point, *first, [](const RunFigures& run, const RunFigures& other) {
      return other.cpu_seconds_per_token > 0 ? run.cpu_seconds_per_token / other.cpu_seconds_per_token : 0.0;
    });
    if (point.oversubscribed || first->oversubscribed) continue;
    point.efficiency = within_repeats(point, *first, [](const RunFigures& run, const RunFigures& other) {
      return run.tokens_per_second / run.ranks / (other.tokens_per_second / other.ranks);
    });
  }

  for (const PointResult& point : results.points) {
    const std::string where = point.plan.key().text();
    std::set<std::string> digests;
    std::set<std::string> said;
    const auto differs = [&](const std::string& text) {
      if (said.insert(text).second) results.differences.push_back(where + ": " + text);
    };
    for (const RunFigures& run : point.runs) {
      digests.insert(run.weights_digest);
      if (run.formula_bytes && (run.bytes != run.formula_bytes || run.elements != run.formula_elements)) {
        differs(fmt::format("{} elements and {} bytes were sent, by the formula {} and {}", run.elements,
                            run.bytes, *run.formula_elements, *run.formula_bytes));
      }
      if (point.plan.placed && run.ranks_on_node != point.plan.ranks_per_node) {
        differs(fmt::format("{} rank{} on the node of rank 0, {} were planned: say --ranks-per-node",
                            run.ranks_on_node, run.ranks_on_node == 1 ? " was" : "s were",
                            point.plan.ranks_per_node));
      }
      if (point.plan.placed && run.bytes != point.plan.bytes) {
        differs(fmt::format("{} bytes were sent, {} were planned", run.bytes, point.plan.bytes));
      }
      for (const Tier tier : all_tiers) {
        const auto t = static_cast<std::size_t>(tier);
        if (run.peak[t] != point.plan.peak[t]) {
          differs(fmt::format("{} memory of {} bytes was measured, {} were predicted", name_of(tier),
                              run.peak[t], point.plan.peak[t]));
        }
      }
    }
    if (digests.size() > 1) differs("repeats ended with different weights");
  }
  return results;
}

int base_ranks(const StudyResults& results) {
  return results.points.empty() ? 1 : results.points.front().plan.ranks;
}

}  // namespace tranche::tools
