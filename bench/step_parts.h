#pragma once
/// The parts of a step's time, from the spans of its stream.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/core/trace.h"

namespace tranche::bench {

/// The part of a step that a span of the compute stream belongs to; spans without a class keep their own
/// name.
std::string part_of_step(std::string_view span);

/// Sums by part over steps; what lies between the spans (the engine, waits) is a part as well, so the parts
/// add up to the step.
class StepParts {
 public:
  /// Takes the spans that `trace` recorded on `track` behind its first `spans_before`; `seconds` of the step
  /// by the spans' clock.
  void add_step(const TraceRecorder& trace, std::string_view track, std::int64_t spans_before,
                double seconds);

  struct Line {
    std::string name;
    std::int64_t calls = 0;  ///< of a step
    double seconds = 0;      ///< median over steps
  };
  /// Longest first.
  std::vector<Line> lines() const;
  /// Seconds of each matrix product in the step's order, the bias and activation that it has with it: medians
  /// over steps. Throws InvalidArgument where steps have different numbers of them.
  std::vector<double> products() const;
  /// Share of the steps' time that lies in spans.
  double named_share() const;

 private:
  struct Sum {
    std::int64_t calls = 0;
    double seconds = 0;
  };
  std::vector<std::map<std::string, Sum>> steps_;
  std::vector<std::vector<double>> products_;  ///< of each step
  double seconds_ = 0, in_spans_ = 0;
};

}  // namespace tranche::bench
