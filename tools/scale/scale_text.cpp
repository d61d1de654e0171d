// Results of a scaling study as a page, JSON and CSV.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "tools/scale/scale_results.h"

namespace tranche::tools {

namespace {

using nlohmann::ordered_json;

/// "12,345"
std::string grouped(std::int64_t value) {
  std::string digits = std::to_string(value);
  for (std::size_t at = digits.size(); at > 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits;
}

std::string mebibytes(std::int64_t bytes) {
  return fmt::format("{:.2f}", static_cast<double>(bytes) / (1 << 20));
}

std::string rate(double value) {
  return value >= 1000 ? grouped(std::llround(value)) : fmt::format("{:.3g}", value);
}

/// "90 (85 to 95)"; without the range if all are equal.
std::string with_ends(const Spread& spread, const std::function<std::string(double)>& text,
                      const char* unit = "") {
  const std::string middle = text(spread.middle) + unit;
  if (spread.low == spread.high) return middle;
  return fmt::format("{} ({} to {})", middle, text(spread.low), text(spread.high));
}

std::string percent(const Spread& share) {
  return with_ends(
      share, [](double value) { return fmt::format("{:.1f}", 100 * value); }, " %");
}

std::string milliseconds(double seconds) {
  return fmt::format("{:.1f}", 1e3 * seconds);
}

/// "equal", or the expected value.
std::string against(std::int64_t measured, std::int64_t expected, const std::string& text) {
  return measured == expected ? text : fmt::format("{} (**differs**)", text);
}

std::string by_formula(const RunFigures& run) {
  return run.formula_bytes ? against(run.bytes, *run.formula_bytes, grouped(*run.formula_bytes)) : "-";
}

std::string row(const std::vector<std::string>& cells) {
  return fmt::format("| {} |\n", fmt::join(cells, " | "));
}

std::string heading(const std::vector<std::string>& cells) {
  std::string line = "|";
  for (std::size_t i = 0; i < cells.size(); ++i) line += "---|";
  return row(cells) + line + "\n";
}

/// Adds cells of memory, for each tier in use.
void add_memory(std::vector<std::string>& cells, const PointResult& point, const std::vector<Tier>& tiers) {
  for (const Tier tier : tiers) {
    const auto t = static_cast<std::size_t>(tier);
    cells.push_back(mebibytes(point.plan.peak[t]));
    cells.push_back(against(point.shown.peak[t], point.plan.peak[t], mebibytes(point.shown.peak[t])));
  }
}

std::vector<Tier> tiers_of(const StudyResults& results) {
  std::vector<Tier> tiers;
  for (const Tier tier : all_tiers) {
    const auto t = static_cast<std::size_t>(tier);
    const bool any = std::any_of(results.points.begin(), results.points.end(), [&](const PointResult& point) {
      return point.shown.peak[t] > 0 || point.plan.peak[t] > 0;
    });
    if (any) tiers.push_back(tier);
  }
  return tiers;
}

/// Adds the cells after the stage's, if the study compares meshes or schedules.
void add_variant(std::vector<std::string>& cells, const StudyFacts& facts, const std::string& mesh,
                 const std::string& schedule) {
  if (!facts.schedules.front().empty()) cells.insert(cells.begin() + 2, schedule.empty() ? "-" : schedule);
  if (!facts.meshes.front().empty()) cells.insert(cells.begin() + 2, mesh);
}

std::string machine_text(const StudyFacts& facts) {
  return fmt::format("{}, {} cores, {:.0f} GiB, {}; begun {} at a load average of {:.2f}",
                     facts.node.cpu.empty() ? "Processor not named" : facts.node.cpu, facts.node.cores,
                     static_cast<double>(facts.node.memory_bytes) / (1 << 30), facts.node.system, facts.begun,
                     facts.load_average);
}

std::string base_text(int base) {
  return base == 1 ? "one rank" : fmt::format("{} ranks", base);
}

std::string main_table(const StudyFacts& facts, const StudyResults& results) {
  const std::vector<Tier> tiers = tiers_of(results);
  std::vector<std::string> names{"ranks",      "stage",
                                 "batch",      "tokens/s (of repeats)",
                                 "per rank",   fmt::format("{} efficiency", facts.strong ? "strong" : "weak"),
                                 "step, ms",   "exposed communication, ms",
                                 "bytes sent", "by the formula"};
  for (const Tier tier : tiers) {
    const std::string of = tier == Tier::device ? "memory" : std::string(name_of(tier));
    names.push_back(of + " predicted, MiB");
    names.push_back("measured");
  }
  names.emplace_back("of matmul peak");
  add_variant(names, facts, "mesh", "schedule");
  std::string text = heading(names);
  for (const PointResult& point : results.points) {
    if (point.oversubscribed) continue;
    const RunFigures& run = point.shown;
    std::vector<std::string> cells{std::to_string(point.plan.ranks),
                                   std::to_string(point.plan.stage),
                                   std::to_string(point.plan.batch),
                                   with_ends(point.tokens_per_second, rate),
                                   rate(point.tokens_per_second.middle / point.plan.ranks),
                                   point.efficiency ? percent(*point.efficiency) : "",
                                   milliseconds(run.step.seconds()),
                                   milliseconds(run.step.exposed()),
                                   grouped(run.bytes),
                                   by_formula(run)};
    add_memory(cells, point, tiers);
    cells.push_back(fmt::format("{:.1f} %", 100 * run.peak_share(point.peak_flops)));
    add_variant(cells, facts, point.plan.mesh, point.plan.schedule);
    text += row(cells);
  }
  return text;
}

std::string oversubscribed_table(const StudyFacts& facts, const StudyResults& results) {
  const std::vector<Tier> tiers = tiers_of(results);
  std::vector<std::string> names{"ranks", "stage", "batch", "work inflation", "bytes sent", "by the formula"};
  for (const Tier tier : tiers) {
    const std::string of = tier == Tier::device ? "memory" : std::string(name_of(tier));
    names.push_back(of + " predicted, MiB");
    names.push_back("measured");
  }
  add_variant(names, facts, "mesh", "schedule");
  std::string text = heading(names);
  for (const PointResult& point : results.points) {
    if (!point.oversubscribed) continue;
    const RunFigures& run = point.shown;
    std::vector<std::string> cells{
        std::to_string(point.plan.ranks),
        std::to_string(point.plan.stage),
        std::to_string(point.plan.batch),
        point.work_inflation
            ? with_ends(*point.work_inflation, [](double value) { return fmt::format("{:.3f}", value); })
            : "",
        grouped(run.bytes),
        by_formula(run)};
    add_memory(cells, point, tiers);
    add_variant(cells, facts, point.plan.mesh, point.plan.schedule);
    text += row(cells);
  }
  return text;
}

ordered_json spread_json(const Spread& spread) {
  return {{"median", spread.middle}, {"least", spread.low}, {"most", spread.high}};
}

ordered_json or_null(const std::optional<std::int64_t>& count) {
  return count ? ordered_json(*count) : ordered_json();
}

std::string or_empty(const std::optional<std::int64_t>& count) {
  return count ? std::to_string(*count) : "";
}

ordered_json run_json(const RunFigures& run, double peak_flops) {
  ordered_json peak = ordered_json::object();
  for (const Tier tier : all_tiers)
    peak[std::string(name_of(tier))] = run.peak[static_cast<std::size_t>(tier)];
  return {{"repeat", run.repeat},
          {"tokens_per_second", run.tokens_per_second},
          {"tokens_per_step", run.tokens_per_step},
          {"seconds_per_step", run.step.seconds()},
          {"compute_seconds", run.step.compute},
          {"exposed_gather_seconds", run.step.gather},
          {"exposed_reduce_seconds", run.step.reduce},
          {"exposed_message_seconds", run.step.messages},
          {"update_seconds", run.step.update},
          {"other_seconds", run.step.other},
          {"cpu_seconds_per_token", run.cpu_seconds_per_token},
          {"elements_sent", run.elements},
          {"formula_elements", or_null(run.formula_elements)},
          {"bytes_sent", run.bytes},
          {"formula_bytes", or_null(run.formula_bytes)},
          {"memory_measured_bytes", peak},
          {"state_measured_bytes", run.state},
          {"matmul_peak_flops", run.peak_flops},
          {"matmul_peak_share", run.peak_share(peak_flops)},
          {"ranks_on_host", run.ranks_on_node},
          {"threads", run.threads},
          {"cores", run.cores},
          {"weights_digest", run.weights_digest}};
}

}  // namespace

std::string results_json(const StudyFacts& facts, const StudyResults& results, const std::string& settings) {
  ordered_json points = ordered_json::array();
  for (const PointResult& point : results.points) {
    ordered_json predicted = ordered_json::object(), runs = ordered_json::array();
    for (const Tier tier : all_tiers) {
      predicted[std::string(name_of(tier))] = point.plan.peak[static_cast<std::size_t>(tier)];
    }
    for (const RunFigures& run : point.runs) runs.push_back(run_json(run, point.peak_flops));
    ordered_json one = {
        {"ranks", point.plan.ranks},
        {"stage", point.plan.stage},
        {"mesh", point.plan.mesh},
        {"pipeline_schedule", point.plan.schedule},
        {"micro_batch", point.plan.micro_batch},
        {"accumulation", point.plan.accumulation},
        {"batch", point.plan.batch},
        {"oversubscribed", point.oversubscribed},
        {"tokens_per_second", spread_json(point.tokens_per_second)},
        {"bytes_predicted", point.plan.placed ? ordered_json(point.plan.bytes) : nullptr},
        {"ranks_per_node", point.plan.placed ? ordered_json(point.plan.ranks_per_node) : nullptr},
        {"memory_predicted_bytes", predicted},
        {"state_predicted_bytes", point.plan.state},
        {"state_formula_bytes", point.plan.formula_state}};
    if (point.efficiency) one["efficiency"] = spread_json(*point.efficiency);
    if (point.work_inflation) one["work_inflation"] = spread_json(*point.work_inflation);
    one["shown_repeat"] = point.shown.repeat;
    one["runs"] = runs;
    points.push_back(one);
  }
  ordered_json failures = ordered_json::array();
  for (const RunFailure& failure : results.failures) {
    failures.push_back({{"ranks", failure.ranks},
                        {"stage", failure.stage},
                        {"mesh", failure.mesh},
                        {"pipeline_schedule", failure.schedule},
                        {"repeat", failure.repeat},
                        {"status", failure.status},
                        {"what", failure.what},
                        {"command", failure.command},
                        {"output_tail", failure.tail}});
  }
  const ordered_json document = {
      {"schema", scale_schema},
      {"version", facts.version},
      {"commit", facts.commit},
      {"machine",
       {{"host", facts.node.name},
        {"cpu", facts.node.cpu},
        {"cores", facts.node.cores},
        {"memory_bytes", facts.node.memory_bytes},
        {"system", facts.node.system}}},
      {"begun", {{"time", facts.begun}, {"load_average", facts.load_average}}},
      {"model", {{"name", facts.model}, {"parameters", facts.parameters}, {"sequence", facts.sequence}}},
      {"base_ranks", base_ranks(results)},
      {"complete", results.whole()},
      {"runs_wanted", results.runs_wanted},
      {"runs_done", results.runs_done},
      {"settings", ordered_json::parse(settings)},
      {"points", points},
      {"failures", failures},
      {"differences", results.differences}};
  return document.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string results_csv(const StudyFacts& facts, const StudyResults& results) {
  std::string text =
      "ranks,stage,repeat,scaling,micro_batch,accumulation,batch,oversubscribed,tokens_per_second,seconds_"
      "per_step,"
      "compute_seconds,exposed_gather_seconds,exposed_reduce_seconds,update_seconds,other_seconds,"
      "cpu_seconds_per_token,elements_sent,formula_elements,bytes_sent,formula_bytes,memory_predicted_bytes,"
      "memory_measured_bytes,state_formula_bytes,state_measured_bytes,matmul_peak_flops,matmul_peak_share,"
      "cpu,cores,"
      "version,commit,mesh,pipeline_schedule,exposed_message_seconds\n";
  std::string cpu = facts.node.cpu;
  std::replace(cpu.begin(), cpu.end(), '"', ' ');
  for (const PointResult& point : results.points) {
    for (const RunFigures& run : point.runs) {
      text += fmt::format("{},{},{},{},{},{},{},{},", run.ranks, run.stage, run.repeat,
                          facts.strong ? "strong" : "weak", point.plan.micro_batch, point.plan.accumulation,
                          point.plan.batch, point.oversubscribed ? 1 : 0);
      text += fmt::format("{},{},{},{},{},{},{},{},", run.tokens_per_second, run.step.seconds(),
                          run.step.compute, run.step.gather, run.step.reduce, run.step.update, run.step.other,
                          run.cpu_seconds_per_token);
      text += fmt::format("{},{},{},{},", run.elements, or_empty(run.formula_elements), run.bytes,
                          or_empty(run.formula_bytes));
      text += fmt::format("{},{},{},{},{},{},", point.plan.peak[0], run.peak[0], point.plan.formula_state,
                          run.state, run.peak_flops, run.peak_share(point.peak_flops));
      text += fmt::format("\"{}\",{},{},{},\"{}\",\"{}\",{}\n", cpu, facts.node.cores, facts.version,
                          facts.commit, point.plan.mesh, point.plan.schedule, run.step.messages);
    }
  }
  return text;
}

std::string results_table(const StudyFacts& facts, const StudyResults& results) {
  const auto plural = [](std::int64_t count, const char* what) {
    return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
  };
  std::string text = fmt::format("# {} scaling of {}\n\n", facts.strong ? "Strong" : "Weak", facts.model);
  text += fmt::format(
      "{} parameters in {}, sequences of {} tokens, {} a rank, {}. Each point {} of {} steps behind {} of "
      "warm-up, "
      "interleaved; {} of {} done. tranche {}{}.\n\n{}.\n\n",
      grouped(facts.parameters), facts.dtype, facts.sequence, plural(facts.threads, "thread"),
      facts.strong ? "a step keeps its batch" : "a rank keeps its batch", plural(facts.repeats, "run"),
      facts.steps, facts.warmup, results.runs_done, plural(results.runs_wanted, "run"), facts.version,
      facts.commit.empty() ? ", commit not known" : ", commit " + facts.commit, machine_text(facts));
  const int base = base_ranks(results);
  const auto any = [&](bool over) {
    return std::any_of(results.points.begin(), results.points.end(),
                       [&](const PointResult& point) { return point.oversubscribed == over; });
  };
  if (any(false)) {
    text += main_table(facts, results);
    text += fmt::format(
        "\nEfficiency: tokens/s of a rank against those of a rank among {}, same stage{}, within repeats: "
        "median, least and "
        "most. Times, bytes and memory are of the repeat of median speed; bytes of one rank and step.\n",
        base == 1 ? "1" : std::to_string(base),
        facts.meshes.size() > 1      ? (facts.schedules.size() > 1 ? ", mesh and schedule" : " and mesh")
        : facts.schedules.size() > 1 ? " and schedule"
                                     : "");
  }
  if (any(true)) {
    text += fmt::format(
        "\n## More ranks than cores\n\nThese ranks shared {} of the node, so their speed says nothing of "
        "scaling, and none "
        "is claimed. What they sent and held does not depend on it. Work inflation: processor time of a "
        "token against "
        "that of {}.\n\n",
        plural(facts.node.cores, "core"), base_text(base));
    text += oversubscribed_table(facts, results);
  }
  if (!results.failures.empty()) {
    text += "\n## Runs that failed\n";
    for (const RunFailure& failure : results.failures) {
      text += fmt::format("\n{}:\n\n    {}\n\n", failure.what, failure.command);
      std::string line;
      for (const char c : failure.tail + "\n") {
        if (c != '\n') {
          line += c;
          continue;
        }
        text += "    " + line + "\n";
        line.clear();
      }
    }
  }
  text += "\n## Measured against predicted\n\n";
  if (results.runs_done == 0) {
    text += "No run ended well, so nothing was measured.\n";
  } else if (results.differences.empty()) {
    text += fmt::format(
        "Bytes and elements on the wire are the formula's, and memory is what `tranche plan` says, to the "
        "byte, in every run{}.\n",
        results.whole() ? "" : fmt::format(" of the {} that ended well", results.runs_done));
  }
  for (const std::string& line : results.differences) text += "- " + line + "\n";
  return text;
}

}  // namespace tranche::tools
