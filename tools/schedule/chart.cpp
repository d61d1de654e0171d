#include "tools/schedule/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <set>
#include <vector>

namespace tranche::tools {

namespace {

using pipeline::Action;
using pipeline::PipelineSchedule;
using pipeline::Simulation;
using pipeline::Span;

constexpr std::size_t chart_columns = 120;

struct Cell {
  double time = 0;
  bool exact = true;
};

/// The largest time of which all others are multiples: a fraction of the shortest.
Cell cell_of(const PipelineSchedule& schedule, const Simulation& run) {
  std::set<double> times;
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (const Span& span : run.spans[rank]) {
      // Times are rounded, because the last digits of sums differ.
      if (span.end > span.start)
        times.insert(std::round((span.end - span.start) / run.length * 1e9) * run.length / 1e9);
    }
  }
  if (times.empty()) return {};
  const double shortest = *times.begin();
  for (int parts = 1; parts <= 12; ++parts) {
    const double cell = shortest / parts;
    const auto is_multiple = [&](double time) {
      return std::abs(time / cell - std::round(time / cell)) < 1e-4;
    };
    if (std::all_of(times.begin(), times.end(), is_multiple)) return {cell, true};
  }
  return {shortest / 2, false};
}

std::vector<std::string> cells_of(const PipelineSchedule& schedule, const Simulation& run, std::size_t rank,
                                  double cell, std::size_t cells) {
  std::vector<std::string> line(cells, ".");
  std::size_t first = cells, last = 0;
  for (std::size_t at = 0; at < schedule.ranks[rank].size(); ++at) {
    if (!pipeline::computes(schedule.ranks[rank][at].kind)) continue;
    const Span& span = run.spans[rank][at];
    const auto start = std::min(cells, static_cast<std::size_t>(std::llround(span.start / cell)));
    const auto end = std::min(cells, static_cast<std::size_t>(std::llround(span.end / cell)));
    for (std::size_t i = start; i < end; ++i)
      line[i] = i == start ? schedule.name_of(schedule.ranks[rank][at]) : "--";
    first = std::min(first, start);
    last = std::max(last, end);
  }
  for (std::size_t i = 0; i < cells; ++i) {
    if (i < first) line[i] = "s";
    if (i >= last) line[i] = "c";
  }
  return line;
}

}  // namespace

std::string chart_text(const PipelineSchedule& schedule, const Simulation& run) {
  const Cell cell = cell_of(schedule, run);
  if (!(run.length <= cell.time * most_chart_cells)) {
    return fmt::format("no chart: it would have more than {} cells on a rank\n", most_chart_cells);
  }
  if (cell.time <= 0) return {};  // no action takes any time
  const auto cells = static_cast<std::size_t>(std::llround(run.length / cell.time));
  std::vector<std::vector<std::string>> lines;
  std::size_t width = 2;
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    lines.push_back(cells_of(schedule, run, rank, cell.time, cells));
    for (const std::string& one : lines.back()) width = std::max(width, one.size());
  }
  const std::string last_rank = std::to_string(schedule.ranks.size() - 1);
  const std::size_t label = 5 + last_rank.size() + 1;
  const std::size_t in_a_line = std::max<std::size_t>(1, (chart_columns - label) / (width + 1));
  std::string text;
  for (std::size_t from = 0; from < cells; from += in_a_line) {
    const std::size_t to = std::min(cells, from + in_a_line);
    if (cells > in_a_line) {
      text += fmt::format("{}time {:.6g} to {:.6g}\n", from == 0 ? "" : "\n",
                          static_cast<double>(from) * cell.time, static_cast<double>(to) * cell.time);
    }
    for (std::size_t rank = 0; rank < lines.size(); ++rank) {
      std::string line = fmt::format("rank {:>{}} ", rank, last_rank.size());
      for (std::size_t i = from; i < to; ++i) line += fmt::format(" {:<{}}", lines[rank][i], width);
      text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
  }
  text += fmt::format("a cell is {:.6g} long{}; idle: s start-up, . bubble, c cool-down\n", cell.time,
                      cell.exact ? "" : ", to which starts and ends are rounded");
  return text;
}

}  // namespace tranche::tools
