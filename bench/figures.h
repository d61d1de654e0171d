#pragma once
/// Figures of the seconds that benches measure.

#include <vector>

namespace tranche::bench {

/// Wall-clock time, and processor time of all threads, which is steadier on a machine that is shared.
struct Seconds {
  double wall = 0;
  double processor = 0;
};
Seconds clocks_now();
Seconds operator-(const Seconds& a, const Seconds& b);

/// The middle one, or the mean of the two in the middle; 0 of none.
double median(std::vector<double> values);
/// The value that `share` (0 to 1) of the others are below, the nearest one; of one value at least.
double quantile(std::vector<double> values, double share);

}  // namespace tranche::bench
