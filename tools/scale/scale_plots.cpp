// The plots of a scaling study.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "report/plot.h"
#include "tools/scale/scale_results.h"

namespace tranche::tools {

namespace {

using Named = std::pair<std::string, std::string>;

/// The color depends on the stage; in a study of several meshes or schedules, every curve has a different
/// one.
std::string color_of(const StudyFacts& facts, const CurveKey& curve) {
  if (facts.variants().size() == 1) return std::string(plot::color(plot::Palette::stage, curve.stage));
  const auto number = std::distance(facts.curves.begin(), facts.curves.find(curve));
  return std::string(plot::color(plot::Palette::category, static_cast<int>(number)));
}

/// "stage 3", with the mesh or the schedule in a study of several.
std::string label_of(const StudyFacts& facts, const CurveKey& curve) {
  const std::string variant = facts.variant(curve.mesh, curve.schedule);
  return fmt::format("stage {}{}{}", curve.stage, variant.empty() ? "" : ", ", variant);
}

plot::Shape shape_of(int stage) {
  constexpr std::array shapes{plot::Shape::circle, plot::Shape::square, plot::Shape::triangle,
                              plot::Shape::diamond};
  return shapes[static_cast<std::size_t>(stage) % shapes.size()];
}

/// A legend entry that represents the series of all stages.
plot::LineSeries entry(const std::string& name, bool joined, bool hollow, bool dashed = false) {
  plot::LineSeries series{name, "#222222", {}, {}, dashed};
  series.joined = joined;
  series.hollow = hollow;
  return series;
}

std::string what_ran(const StudyFacts& facts) {
  return fmt::format("{}, {} scaling, {}, {} thread{} a rank; {} with {} cores", facts.model,
                     facts.strong ? "strong" : "weak", facts.dtype, facts.threads,
                     facts.threads == 1 ? "" : "s", facts.node.cpu.empty() ? "a node" : facts.node.cpu,
                     facts.node.cores);
}

/// Adds the points of all stages that `takes` accepts, joined or not, with the range of `value` over the
/// repeats. Returns whether there are any.
bool add_points(plot::LineChart& chart, const StudyFacts& facts, const StudyResults& results, bool joined,
                bool hollow, const std::function<bool(const PointResult&)>& takes,
                const std::function<Spread(const PointResult&)>& value) {
  bool any = false;
  for (const auto& [curve, planned] : facts.curves) {
    plot::LineSeries series{"", color_of(facts, curve), {}, {}};
    series.joined = joined;
    series.hollow = hollow;
    series.shape = shape_of(curve.stage);
    for (const PointResult& point : results.points) {
      const PointPlan& plan = point.plan;
      if (CurveKey{plan.stage, plan.mesh, plan.schedule} != curve || !takes(point)) continue;
      const Spread spread = value(point);
      series.x.push_back(point.plan.ranks);
      series.y.push_back(spread.middle);
      series.low.push_back(spread.low);
      series.high.push_back(spread.high);
    }
    if (series.x.empty()) continue;
    any = true;
    chart.series.push_back(std::move(series));
  }
  return any;
}

/// The shaded band of points whose ranks share cores. It begins between the last number of ranks with enough
/// cores and the first without.
std::vector<plot::Band> shaded(const StudyResults& results) {
  double first = 0, before = 0;
  for (const PointResult& point : results.points) {
    const double ranks = point.plan.ranks;
    if (point.oversubscribed && (first == 0 || ranks < first)) first = ranks;
    if (!point.oversubscribed) before = std::max(before, ranks);
  }
  if (first == 0) return {};
  const double begin = before > 0 && before < first ? std::sqrt(before * first) : first;
  return {{begin, 1e9, "ranks share cores", "#f0f0f0"}};
}

void add_throughput(std::vector<Named>& plots, const StudyFacts& facts, const StudyResults& results) {
  plot::LineChart chart;
  chart.title = fmt::format("Throughput, {} scaling", facts.strong ? "strong" : "weak");
  chart.subtitle = what_ran(facts);
  chart.x_label = "ranks";
  chart.y_label = "tokens per second, all ranks, logarithmic";
  chart.logarithmic = true;
  const auto speed = [](const PointResult& point) { return point.tokens_per_second; };
  if (add_points(
          chart, facts, results, true, false, [](const PointResult& p) { return !p.oversubscribed; },
          speed)) {
    chart.legend.push_back(entry("median, lowest and highest of the repeats", true, false));
  }
  const int base = base_ranks(results);
  std::vector<double> speeds;
  double last = 0;
  for (const PointResult& point : results.points) {
    if (point.oversubscribed) continue;
    last = std::max(last, static_cast<double>(point.plan.ranks));
    if (point.plan.ranks == base) speeds.push_back(speed(point).middle);
  }
  if (!speeds.empty() && last > base) {
    const double of_rank = spread_of(speeds).middle / base;
    chart.series.push_back({fmt::format("ideal, from {} rank{}", base, base == 1 ? "" : "s"),
                            std::string(plot::grey),
                            {static_cast<double>(base), last},
                            {of_rank * base, of_rank * last},
                            true});
  }
  if (add_points(
          chart, facts, results, false, true, [](const PointResult& p) { return p.oversubscribed; }, speed)) {
    chart.legend.push_back(entry("on shared cores", false, true));
  }
  for (const auto& [curve, planned] : facts.curves) {
    const std::string color = color_of(facts, curve);
    const auto last = std::find_if(chart.series.rbegin(), chart.series.rend(),
                                   [&](const plot::LineSeries& s) { return s.color == color; });
    if (last != chart.series.rend()) last->end = label_of(facts, curve);
  }
  chart.bands = shaded(results);
  if (!chart.bands.empty()) chart.subtitle += "; where ranks share cores, no speed-up is claimed";
  if (!chart.series.empty()) plots.emplace_back("throughput.svg", plot::to_svg(chart));
}

void add_time(std::vector<Named>& plots, const StudyFacts& facts, const StudyResults& results,
              bool oversubscribed) {
  plot::BarChart chart;
  chart.title =
      oversubscribed ? "Time of a step where ranks share cores: no speed-up is claimed" : "Time of a step";
  chart.subtitle = what_ran(facts);
  chart.stacked = true;
  chart.x_label = "stage";
  const std::vector<std::string> variants = facts.variants();
  const char* const kind = facts.meshes.size() == 1      ? ", schedule "
                           : facts.schedules.size() == 1 ? ", mesh "
                                                         : ", mesh and schedule ";
  for (std::size_t v = 0; variants.size() > 1 && v < variants.size(); ++v) {
    chart.x_label += fmt::format("{}{}: {}", v == 0 ? kind : "; ", v + 1, variants[v]);
  }
  chart.subtitle += "; rank 0 in the repeat of median speed";
  chart.y_label = "step time (ms)";
  chart.y_scale = plot::Scale::number;
  const auto part = [](int index) { return std::string(plot::color(plot::Palette::part, index)); };
  chart.series = {{"compute", part(0), {}},
                  {"exposed gather", part(1), {}},
                  {"exposed reduce", part(2), {}},
                  {"step: norm, agree, update", part(3), {}},
                  {"other", std::string(plot::grey), {}}};
  const bool messages = std::any_of(results.points.begin(), results.points.end(), [&](const PointResult& p) {
    return p.oversubscribed == oversubscribed && p.shown.step.messages > 0;
  });
  if (messages) chart.series.push_back({"exposed messages", part(4), {}});
  plot::BandRow row{"ranks", {}};
  for (const PointResult& point : results.points) {
    if (point.oversubscribed != oversubscribed) continue;
    const StepParts& step = point.shown.step;
    const double parts[] = {step.compute, step.gather, step.reduce, step.update, step.other, step.messages};
    for (std::size_t i = 0; i < chart.series.size(); ++i) chart.series[i].values.push_back(1e3 * parts[i]);
    const auto at = static_cast<double>(chart.labels.size());
    std::string label = std::to_string(point.plan.stage);
    if (variants.size() > 1) {
      const auto own =
          std::find(variants.begin(), variants.end(), facts.variant(point.plan.mesh, point.plan.schedule));
      label += fmt::format(" ({})", own - variants.begin() + 1);
    }
    chart.labels.push_back(std::move(label));
    const double total = 1e3 * step.seconds();
    chart.notes.push_back(fmt::format("{:.{}f}", total, total < 10 ? 2 : total < 100 ? 1 : 0));
    const std::string name = fmt::format("{}", point.plan.ranks);
    if (row.bands.empty() || row.bands.back().label != name) row.bands.push_back({at, at, name, "#eef3f8"});
    row.bands.back().end = at + 1;
  }
  if (chart.labels.empty()) return;
  chart.rows = {row};
  plots.emplace_back(oversubscribed ? "time_shared_cores.svg" : "time.svg", plot::to_svg(chart));
}

void add_memory(std::vector<Named>& plots, const StudyFacts& facts, const StudyResults& results,
                const std::string& name, const std::string& title, const std::string& curve,
                const std::function<std::int64_t(const PointPlan&)>& predicted,
                const std::function<std::int64_t(const PointResult&)>& measured) {
  plot::LineChart chart;
  chart.title = title;
  chart.subtitle = what_ran(facts);
  chart.x_label = "ranks";
  chart.y_label = "bytes of a rank";
  chart.y_scale = plot::Scale::bytes;
  chart.logarithmic_x = true;
  add_points(
      chart, facts, results, false, false, [](const PointResult&) { return true; },
      [&](const PointResult& point) {
        const auto bytes = static_cast<double>(measured(point));
        return Spread{bytes, bytes, bytes};
      });
  chart.legend = {entry("measured", false, false), entry(curve, true, false, true)};
  for (const auto& [curve, points] : facts.curves) {
    plot::LineSeries series{"", color_of(facts, curve), {}, {}, true};
    series.end = label_of(facts, curve);
    for (const PointPlan& point : points) {
      series.x.push_back(point.ranks);
      series.y.push_back(static_cast<double>(predicted(point)));
    }
    chart.series.push_back(std::move(series));
  }
  if (!results.points.empty()) plots.emplace_back(name, plot::to_svg(chart));
}

}  // namespace

std::vector<Named> results_plots(const StudyFacts& facts, const StudyResults& results) {
  std::vector<Named> plots;
  if (results.points.empty()) return plots;
  add_throughput(plots, facts, results);
  add_time(plots, facts, results, false);
  add_time(plots, facts, results, true);
  // Model state comes first, because in the peak the workspace and the activations, which no stage shards,
  // hide its decrease. With offload the formula covers all tiers together.
  if (!facts.any_offload) {
    add_memory(
        plots, facts, results, "model_state.svg", "Parameters, gradients and optimizer state of a rank",
        "formula", [](const PointPlan& plan) { return plan.formula_state; },
        [](const PointResult& point) { return point.shown.state; });
  }
  constexpr auto device = static_cast<std::size_t>(Tier::device);
  add_memory(
      plots, facts, results, "memory.svg", "Memory of a rank at its peak", "predicted",
      [](const PointPlan& plan) { return plan.peak[device]; },
      [](const PointResult& point) { return point.shown.peak[device]; });
  return plots;
}

}  // namespace tranche::tools
