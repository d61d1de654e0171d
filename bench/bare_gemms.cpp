#include "bench/bare_gemms.h"

#include <algorithm>
#include <map>

namespace tranche::bench {

namespace {

Seconds medians(const std::vector<Seconds>& times) {
  std::vector<double> wall, processor;
  for (const auto& time : times) {
    wall.push_back(time.wall);
    processor.push_back(time.processor);
  }
  return {median(wall), median(processor)};
}

}  // namespace

BareGemms::BareGemms(const std::vector<kernels::Gemm>& list, int threads) {
  std::map<kernels::Gemm, std::int64_t> counts;
  for (const auto& gemm : list) ++counts[gemm];
  for (const auto& [gemm, count] : counts) {
    Entry entry{gemm, count, {}};
    for (auto& way : ways_of(gemm, threads)) entry.ways.push_back({std::move(way), {}});
    for (auto& way : entry.ways) way.way.run();  // maps pages, and creates primitives and threads
    entries_.push_back(std::move(entry));
  }
}

void BareGemms::round() {
  for (auto& entry : entries_) {
    for (auto& way : entry.ways) {
      const Seconds begin = clocks_now();
      way.way.run();
      way.times.push_back(clocks_now() - begin);
    }
  }
  ++rounds_;
}

std::vector<BareGemms::Line> BareGemms::lines() const {
  std::vector<Line> lines;
  for (const auto& entry : entries_) {
    Line line;
    line.gemm = entry.gemm;
    line.count = entry.count;
    line.operations = 2e0 * static_cast<double>(entry.gemm.m) * static_cast<double>(entry.gemm.n) *
                      static_cast<double>(entry.gemm.k);
    line.ours = line.best = medians(entry.ways.front().times);
    line.best_by_processor = entry.ways.front().way.name;
    for (const auto& way : entry.ways) {
      const Seconds time = medians(way.times);
      line.best.wall = std::min(line.best.wall, time.wall);
      if (time.processor < line.best.processor) line.best_by_processor = way.way.name;
      line.best.processor = std::min(line.best.processor, time.processor);
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

Seconds BareGemms::list_seconds(std::size_t round, bool ours) const {
  Seconds total;
  for (const auto& entry : entries_) {
    const Way* wall = &entry.ways.front();
    const Way* processor = wall;
    for (const auto& way : entry.ways) {
      if (ours) break;
      if (medians(way.times).wall < medians(wall->times).wall) wall = &way;
      if (medians(way.times).processor < medians(processor->times).processor) processor = &way;
    }
    total.wall += static_cast<double>(entry.count) * wall->times[round].wall;
    total.processor += static_cast<double>(entry.count) * processor->times[round].processor;
  }
  return total;
}

double BareGemms::operations() const {
  double total = 0;
  for (const auto& line : lines()) total += static_cast<double>(line.count) * line.operations;
  return total;
}

}  // namespace tranche::bench
