#pragma once
/// Statistics of the seconds that benches measure.

#include <vector>

namespace tranche::bench {

/// Wall-clock time, and the processor time of all threads, which varies less on a shared machine.
struct Seconds {
  double wall = 0;
  double processor = 0;
};
Seconds clocks_now();
Seconds operator-(const Seconds& a, const Seconds& b);

/// The median: the middle value, or the mean of the two in the middle; 0 for an empty list.
double median(std::vector<double> values);
/// The value at the quantile `share` (0 to 1), taken at the nearest index; at least one value.
double quantile(std::vector<double> values, double share);

}  // namespace tranche::bench
