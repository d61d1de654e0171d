#pragma once
/// How long a schedule takes and what it holds, from times alone: the longest path through its actions.
/// Messages, gathers and frees take no time.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// Times of a rank's whole share of the model for one micro-batch, by rank, in any unit. A chunk takes its
/// part of them: with v chunks on a rank, 1/v. A backward that is not split takes the sum of `input` and
/// `weight`.
struct StageTimes {
  std::vector<double> forward, input, weight;
  static StageTimes equal(int stages, double forward = 1, double input = 1, double weight = 1);
  /// Throws InvalidArgument unless there are times for so many stages, all finite and none below 0.
  void require(std::size_t stages) const;
  /// The same by chunk of the whole model.
  StageTimes by_chunk(const std::vector<int>& rank_of_chunk) const;
};

struct Span {
  double start = 0, end = 0;
};

/// A rank's share of the length of a step, by what it does.
struct RankTimes {
  double busy = 0;
  double start_up = 0;   ///< idle before its first compute action
  double bubble = 0;     ///< idle between its compute actions
  double cool_down = 0;  ///< idle behind its last
};

struct Simulation {
  std::vector<std::vector<Span>> spans;  ///< one for each action, in the order of the schedule's lists
  double length = 0;
  double utilization = 0;  ///< busy time of all ranks over ranks times length
  std::vector<RankTimes> ranks;
  std::vector<std::int64_t> peak_activations;  ///< see peak_activations()
};

/// Runs the schedule on paper. It may have messages or not; a message waits for its send and a send for
/// nothing. Linear in the number of actions. Throws InvalidArgument for times that are not one for each rank
/// or are negative or not finite, and for a schedule that does not come to its end, with the action that
/// waits: the checker says more.
Simulation simulate(const PipelineSchedule& schedule, const StageTimes& times);

/// The most pairs of chunk and micro-batch that are open on each rank at once. A pair is open from its F to
/// its B, or to its W where the backward is split.
std::vector<std::int64_t> peak_activations(const PipelineSchedule& schedule);

}  // namespace tranche::pipeline
