#include "bench/figures.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "core/clock.h"

namespace tranche::bench {

Seconds clocks_now() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return {detail::seconds_now(), static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec)};
}

Seconds operator-(const Seconds& a, const Seconds& b) {
  return {a.wall - b.wall, a.processor - b.processor};
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(std::lround(share * static_cast<double>(values.size() - 1)))];
}

}  // namespace tranche::bench
