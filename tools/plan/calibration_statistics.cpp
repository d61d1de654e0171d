#include "tools/plan/calibration_statistics.h"

#include <algorithm>

namespace tranche::tools {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<planner::ProductTable> median_tables(
    const std::vector<std::vector<planner::ProductTable>>& passes) {
  std::vector<planner::ProductTable> result = passes.front();
  for (std::size_t table = 0; table < result.size(); ++table) {
    for (std::size_t rate = 0; rate < result[table].rates.size(); ++rate) {
      std::vector<double> values;
      for (const auto& tables : passes) values.push_back(tables[table].rates[rate]);
      result[table].rates[rate] = median(std::move(values));
    }
  }
  return result;
}

std::vector<planner::KernelTable> median_tables(
    const std::vector<std::vector<planner::KernelTable>>& passes) {
  std::vector<planner::KernelTable> result = passes.front();
  for (std::size_t table = 0; table < result.size(); ++table) {
    auto& points = result[table].time.points;
    for (std::size_t point = 0; point < points.size(); ++point) {
      std::vector<double> values;
      for (const auto& tables : passes) values.push_back(tables[table].time.points[point].second);
      points[point].second = median(std::move(values));
    }
  }
  return result;
}

void replace_tables(planner::ComputeShare& share, std::vector<planner::KernelTable> tables) {
  for (planner::KernelTable& table : tables) {
    const auto old = std::find_if(
        share.kernels.begin(), share.kernels.end(),
        [&](const planner::KernelTable& one) { return one.name == table.name && one.dtype == table.dtype; });
    if (old == share.kernels.end()) {
      share.kernels.push_back(std::move(table));
    } else {
      *old = std::move(table);
    }
  }
}

double waiting_factor(const std::vector<SharedSteps>& visits) {
  std::vector<double> factors;
  for (const SharedSteps& visit : visits) {
    if (visit.own.size() < least_steps) continue;
    const double own = median(visit.own);
    if (own >= least_seconds) factors.push_back(median(visit.passed) / own);
  }
  return factors.empty() ? 1 : std::max(1.0, median(std::move(factors)));
}

void slow_down(planner::ComputeShare& share, double factor) {
  share.launch_seconds *= factor;
  for (planner::ProductTable& table : share.products) {
    for (double& rate : table.rates) rate /= factor;
  }
  for (planner::KernelTable& table : share.kernels) {
    for (auto& [size, seconds] : table.time.points) seconds *= factor;
  }
}

}  // namespace tranche::tools
