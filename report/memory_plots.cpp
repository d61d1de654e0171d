// The plots of a memory profile.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "report/memory_profile_impl.h"

namespace tranche::memory_profile {

namespace {

std::size_t index_of(Tier tier) {
  return static_cast<std::size_t>(tier);
}

/// The order from the bottom: lasting memory first, then memory that comes and goes.
constexpr std::array<Category, category_count> stacking{
    Category::parameters, Category::optimizer, Category::workspace, Category::communication,
    Category::other,      Category::gradients, Category::gathered,  Category::activations};

std::string color_of(Category category) {
  switch (category) {
    case Category::parameters:
      return std::string(plot::color(plot::Palette::category, 0));
    case Category::gathered:
      return std::string(plot::color(plot::Palette::category, 4));
    case Category::gradients:
      return std::string(plot::color(plot::Palette::category, 3));
    case Category::optimizer:
      return std::string(plot::color(plot::Palette::category, 2));
    case Category::activations:
      return std::string(plot::color(plot::Palette::category, 1));
    case Category::communication:
      return std::string(plot::color(plot::Palette::category, 5));
    case Category::workspace:
      return std::string(plot::color(plot::Palette::category, 6));
    case Category::other:
      break;
  }
  return std::string(plot::grey);
}

std::string color_of_phase(std::string_view phase) {
  if (phase == "forward") return "#cfe2f3";
  if (phase == "backward") return "#fde3c8";
  if (phase == "reduce") return "#e3d3ee";
  if (phase == "step") return "#d5ead0";
  if (phase == "save" || phase == "load") return "#f4cccc";
  if (phase == "evaluate") return "#e8f0c8";
  return "#f4f4f4";
}

constexpr std::size_t columns = 840;

/// Adds a range to a row. A range shorter than `least` becomes part of its neighbour, and equal neighbours
/// are merged.
void add_band(plot::BandRow& row, double begin, double end, const std::string& label,
              const std::string& color, double least) {
  if (end - begin < least) {
    if (!row.bands.empty()) row.bands.back().end = end;
    return;
  }
  if (!row.bands.empty() && row.bands.back().label == label) {
    row.bands.back().end = end;
    return;
  }
  if (!row.bands.empty()) begin = row.bands.back().end;
  row.bands.push_back({begin, end, label, color});
}

/// The memory held in [begin, end): a column shows the instant with the most memory in its time range.
plot::AreaChart area_chart(const MemoryRecord& record, Tier tier, double begin, double end) {
  const std::size_t t = index_of(tier);
  const bool long_run = end - begin > 10;
  const double unit = long_run ? 1 : 1e-3;  // of the x axis
  plot::AreaChart chart;
  chart.x_label = long_run ? "seconds" : "milliseconds";
  for (std::size_t i = 0; i <= columns; ++i) {
    chart.edges.push_back((end - begin) / unit * static_cast<double>(i) / columns);
  }
  struct Instant {
    CategoryBytes bytes;
    std::int64_t free = -1, used = -1;
    std::uint16_t phase = 0, unit = 0;
  };
  std::vector<Instant> fullest(columns);
  plot::BandRow phases{"phase", {}}, units{"unit", {}};
  const double least = (end - begin) / columns / 2;
  MemoryState before = record.start;
  double since = record.began;
  double phase_since = record.began, unit_since = record.began;
  const auto clamp_time = [&](double seconds) { return std::clamp(seconds, begin, end); };
  const auto place = [&](double seconds) { return (clamp_time(seconds) - begin) / unit; };
  const auto lasted = [&](const MemoryState& state, double until) {
    if (until < begin || since >= end) return;
    const auto column = [&](double seconds) {
      const double share = (clamp_time(seconds) - begin) / (end - begin);
      return std::min(static_cast<std::size_t>(share * columns), columns - 1);
    };
    const std::int64_t used = state.total(tier) - state.block_free[t];
    for (std::size_t c = column(since); c <= column(until); ++c) {
      Instant& instant = fullest[c];
      if (used < instant.used) continue;
      if (used == instant.used && state.block_free[t] <= instant.free) continue;
      instant = {state.current[t], state.block_free[t], used, state.phase, state.unit};
    }
  };
  const auto close_phase = [&](double now) {
    if (now > begin && phase_since < end) {
      const std::string& name = record.phases[before.phase];
      add_band(phases, place(phase_since), place(now), name, color_of_phase(name), least / unit);
    }
    phase_since = now;
  };
  const auto close_unit = [&](double now) {
    if (now > begin && unit_since < end) {
      add_band(units, place(unit_since), place(now), record.units[before.unit], "", least / unit);
    }
    unit_since = now;
  };
  record.replay([&](const MemoryEvent& event, std::int64_t, const MemoryState& state) {
    lasted(before, event.seconds);
    if (state.phase != before.phase) close_phase(event.seconds);
    if (state.unit != before.unit) close_unit(event.seconds);
    before = state;
    since = event.seconds;
  });
  lasted(before, record.ended);
  close_phase(record.ended);
  close_unit(record.ended);

  std::size_t top = 0;
  for (std::size_t c = 1; c < columns; ++c) {
    if (fullest[c].used > fullest[top].used) top = c;
  }
  const auto series = [&](const std::string& name, const std::string& color, bool hatched,
                          const auto& value) {
    plot::Series one{name, color, {}, hatched};
    bool any = false;
    for (const Instant& instant : fullest) {
      one.values.push_back(static_cast<double>(std::max<std::int64_t>(value(instant), 0)));
      any |= one.values.back() > 0;
    }
    if (!any) return;
    one.name += "  " + format_bytes(static_cast<std::int64_t>(one.values[top]));
    chart.series.push_back(std::move(one));
  };
  for (const Category category : stacking) {
    series(std::string(name_of(category)), color_of(category), false, [&](const Instant& instant) {
      return instant.bytes[category] -
             (category == Category::other ? std::max<std::int64_t>(instant.free, 0) : 0);
    });
  }
  series("held but free", std::string(plot::grey), true, [](const Instant& i) { return i.free; });
  chart.rows = {std::move(phases), std::move(units)};
  const auto mark = [&](const char* what, std::size_t column, std::int64_t bytes) {
    const Instant& instant = fullest[column];
    const std::string& at_work = record.units[instant.unit];
    chart.marks.push_back({(chart.edges[column] + chart.edges[column + 1]) / 2,
                           static_cast<double>(std::max<std::int64_t>(bytes, 0)),
                           fmt::format("{}: {} in {}{}{}", what, format_bytes(bytes),
                                       record.phases[instant.phase], at_work.empty() ? "" : " ", at_work)});
  };
  mark("most in use", top, fullest[top].used);
  const auto held = [&](std::size_t column) {
    return fullest[column].used + std::max<std::int64_t>(fullest[column].free, 0);
  };
  std::size_t highest = top;
  for (std::size_t c = 0; c < columns; ++c) {
    if (held(c) > held(highest)) highest = c;
  }
  if (held(highest) > held(top)) mark("most held", highest, held(highest));
  return chart;
}

/// Selects up to `most` ranks evenly, always including the one with the highest peak.
std::vector<std::size_t> shown_ranks(const Summary& summary, Tier tier, std::size_t most) {
  const std::size_t count = summary.ranks.size(), step = (count + most - 1) / most;
  std::size_t highest = 0;
  for (std::size_t r = 1; r < count; ++r) {
    const auto peak = [&](std::size_t i) { return summary.ranks[i].measured.peak[index_of(tier)]; };
    if (peak(r) > peak(highest)) highest = r;
  }
  std::vector<std::size_t> shown;
  for (std::size_t r = 0; r < count; ++r) {
    if (r % step == 0 || r == highest) shown.push_back(r);
  }
  return shown;
}

}  // namespace

std::vector<StepWindow> whole_steps(const MemoryRecord& record) {
  std::vector<StepWindow> steps;
  double began = -1;
  bool from_its_start = true;  // the next record is at a step's beginning, not in its middle
  const std::int64_t jump =
      record.dropped > 0 ? static_cast<std::int64_t>(record.first.size()) + record.dropped : -1;
  record.replay([&](const MemoryEvent& event, std::int64_t number, const MemoryState&) {
    if (number == jump) {
      began = -1;
      from_its_start = false;
    }
    if (event.kind == MemoryEvent::Kind::phase && began < 0 && from_its_start &&
        record.phases[event.phase] == "forward") {
      began = event.seconds;
    }
    if (event.kind != MemoryEvent::Kind::step) return;
    if (began >= 0 && event.seconds > began) steps.push_back({event.bytes, began, event.seconds});
    began = -1;
    from_its_start = true;
  });
  return steps;
}

namespace {

/// The end of the run's plot. If the time after the last step is longer than the training, and does not
/// contain the peak, only its beginning is shown, in a fifth of the plot.
double end_of_axis(const MemoryRecord& record, const std::vector<StepWindow>& steps,
                   const MemoryRecord::Peak& peak) {
  if (steps.empty()) return record.ended;
  const double trained = steps.back().end - record.began;
  const double cut = steps.back().end + 0.25 * trained;
  return record.ended - steps.back().end > trained && peak.seconds < cut ? cut : record.ended;
}

/// True when all ranks held the same of each category.
bool are_equal(const std::vector<RankFigures>& ranks, std::size_t tier) {
  return std::all_of(ranks.begin(), ranks.end(), [&](const RankFigures& rank) {
    return rank.measured.at_peak[tier].bytes == ranks.front().measured.at_peak[tier].bytes;
  });
}

}  // namespace

std::vector<NamedPlot> rank_plots(const MemoryRecord& record, RankNumber rank) {
  std::vector<NamedPlot> plots;
  const std::vector<StepWindow> steps = whole_steps(record);
  for (const Tier tier : all_tiers) {
    const MemoryRecord::Peak& peak = record.peaks[index_of(tier)];
    if (peak.bytes == 0) continue;
    const auto draw = [&](const std::string& name, const std::string& what, const std::string& more,
                          double begin, double end) {
      plot::AreaChart chart = area_chart(record, tier, begin, end);
      chart.title = fmt::format("{} memory of rank {} of {}: {}",
                                tier == Tier::device ? "Device"
                                : tier == Tier::host ? "Host"
                                                     : "NVMe",
                                rank.rank, rank.ranks, what);
      chart.subtitle = more;
      chart.y_label = "bytes held";
      plots.push_back({fmt::format("{}_{}.svg", name, name_of(tier)), plot::to_svg(chart)});
    };
    constexpr const char* reading =
        "stacked by category, each column its fullest instant; the legend has the bytes at the mark";
    if (!steps.empty()) {
      const StepWindow& last = steps.back();
      draw("step", fmt::format("step {}", last.step), reading, last.begin, last.end);
      const auto at_peak =
          std::find_if(steps.begin(), steps.end(), [&](const StepWindow& s) { return s.step == peak.step; });
      if (at_peak != steps.end() && at_peak->step != last.step && at_peak->begin <= peak.seconds &&
          peak.seconds <= at_peak->end) {
        draw("peak_step", fmt::format("step {}, the one with the peak", at_peak->step), reading,
             at_peak->begin, at_peak->end);
      }
    }
    std::string note = reading;
    if (record.dropped > 0) {
      note += fmt::format("; {} changes in the middle were not kept and are drawn level", record.dropped);
    }
    if (record.ended <= record.began) continue;
    const double shown = end_of_axis(record, steps, peak);
    if (shown < record.ended) {
      note +=
          fmt::format("; the axis ends after {:.3g} s: what comes until {:.3g} s is of after the training",
                      shown - record.began, record.ended - record.began);
    }
    draw("run", "the whole run", note, record.began, shown);
  }
  return plots;
}

std::vector<NamedPlot> job_plots(const Summary& summary) {
  std::vector<NamedPlot> plots;
  constexpr std::size_t most_bars = 48;
  for (const Tier tier : all_tiers) {
    const std::size_t t = index_of(tier);
    if (std::none_of(summary.ranks.begin(), summary.ranks.end(),
                     [&](const RankFigures& rank) { return rank.measured.peak[t] > 0; })) {
      continue;
    }
    const bool equal = summary.ranks.size() > 1 && are_equal(summary.ranks, t);
    const std::vector<std::size_t> shown =
        equal ? std::vector<std::size_t>{0} : shown_ranks(summary, tier, most_bars);
    plot::BarChart ranks;
    ranks.title = fmt::format("{} memory at the peak, by category and rank", tier == Tier::device ? "Device"
                                                                             : tier == Tier::host ? "Host"
                                                                                                  : "NVMe");
    ranks.subtitle =
        equal ? fmt::format("all {} ranks held the same: one bar stands for each; above it what a rank held",
                            summary.ranks.size())
        : shown.size() == summary.ranks.size()
            ? fmt::format("all {} ranks; above the bars what a rank held", shown.size())
            : fmt::format("{} of {} ranks, the fullest among them; above the bars what a rank held",
                          shown.size(), summary.ranks.size());
    ranks.stacked = true;
    ranks.x_label = equal ? "" : "rank";
    ranks.y_label = "bytes held at the peak";
    for (const std::size_t r : shown) {
      ranks.labels.push_back(equal ? fmt::format("each of {} ranks", summary.ranks.size())
                                   : std::to_string(r));
      ranks.notes.push_back(format_bytes(summary.ranks[r].measured.peak[t]));
    }
    for (const Category category : stacking) {
      plot::Series series{std::string(name_of(category)), color_of(category), {}, false};
      bool any = false;
      for (const std::size_t r : shown) {
        series.values.push_back(static_cast<double>(summary.ranks[r].measured.at_peak[t][category]));
        any |= series.values.back() > 0;
      }
      if (any) ranks.series.push_back(std::move(series));
    }
    if (!ranks.series.empty())
      plots.push_back({fmt::format("ranks_{}.svg", name_of(tier)), plot::to_svg(ranks)});
    const RankFigures& rank = summary.ranks.front();
    // Bars that are equal in pairs would add nothing to the summary.
    if (!summary.predicted || rank.predicted.at_peak[t].bytes == rank.measured.at_peak[t].bytes) continue;
    plot::BarChart both;
    both.title =
        fmt::format("{} memory of rank 0 at the peak: predicted and measured", tier == Tier::device ? "Device"
                                                                               : tier == Tier::host ? "Host"
                                                                                                    : "NVMe");
    both.subtitle =
        "above the bars measured less predicted, below them what was measured; the prediction is the same "
        "program "
        "on the meta device";
    both.y_label = "bytes";
    both.series = {{"predicted", std::string(plot::color(plot::Palette::category, 0)), {}, true},
                   {"measured", std::string(plot::color(plot::Palette::category, 1)), {}, false}};
    const auto add = [&](const std::string& label, std::int64_t predicted, std::int64_t measured) {
      both.labels.push_back(label + "\n" + format_bytes(measured));
      both.series[0].values.push_back(static_cast<double>(predicted));
      both.series[1].values.push_back(static_cast<double>(measured));
      const std::int64_t difference = measured - predicted;
      both.notes.push_back(difference == 0 ? "equal"
                                           : (difference > 0 ? "+" : "") + format_bytes(difference));
    };
    for (const Category category : stacking) {
      const std::int64_t predicted = rank.predicted.at_peak[t][category];
      const std::int64_t measured = rank.measured.at_peak[t][category];
      if (predicted != 0 || measured != 0) add(std::string(name_of(category)), predicted, measured);
    }
    add("total", rank.predicted.peak[t], rank.measured.peak[t]);
    plots.push_back({fmt::format("predicted_{}.svg", name_of(tier)), plot::to_svg(both)});
  }
  return plots;
}

}  // namespace tranche::memory_profile
