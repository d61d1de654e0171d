#pragma once
/// The parts of a step's time, derived from the spans of its stream.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/core/trace.h"

namespace tranche::bench {

/// The part of a step to which a span of the compute stream belongs; a span without a class is a part with
/// its own name.
std::string part_of_step(std::string_view span);

/// Sums by part over steps. The time between spans (the engine, waits) is a part as well, so that the parts
/// add up to the step.
class StepParts {
 public:
  /// Adds the spans that `trace` recorded on `track`, except the first `spans_before`. `seconds`: those of
  /// the step by the spans' clock.
  void add_step(const TraceRecorder& trace, std::string_view track, std::int64_t spans_before,
                double seconds);

  struct Line {
    std::string name;
    std::int64_t calls = 0;  ///< calls in a step
    double seconds = 0;      ///< median over steps
  };
  /// Longest first.
  std::vector<Line> lines() const;
  /// Seconds of each GEMM in the step's order, including its bias and activation: medians over steps. Throws
  /// InvalidArgument if the steps have different numbers of GEMMs.
  std::vector<double> products() const;
  /// The fraction of the steps' time that is in spans.
  double named_share() const;

 private:
  struct Sum {
    std::int64_t calls = 0;
    double seconds = 0;
  };
  std::vector<std::map<std::string, Sum>> steps_;
  std::vector<std::vector<double>> products_;  ///< one list for each step
  double seconds_ = 0, in_spans_ = 0;
};

}  // namespace tranche::bench
