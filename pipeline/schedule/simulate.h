#pragma once
/// Computes a schedule's duration and the activations it holds from given times: the longest path through its
/// actions. Messages, gathers and frees take no time.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// The times of a rank's whole share of the model for one micro-batch, by rank, in any unit. With v chunks on
/// a rank, each chunk takes 1/v of them. A backward that is not split takes the sum of `input` and `weight`.
struct StageTimes {
  std::vector<double> forward, input, weight;
  static StageTimes equal(int stages, double forward = 1, double input = 1, double weight = 1);
  /// Throws InvalidArgument unless there are times for exactly so many stages, all finite and not negative.
  void require(std::size_t stages) const;
  /// The same times by chunk of the whole model.
  StageTimes by_chunk(const std::vector<int>& rank_of_chunk) const;
};

struct Span {
  double start = 0, end = 0;
};

/// How a rank spends the duration of a step.
struct RankTimes {
  double busy = 0;
  double start_up = 0;   ///< idle before its first compute action
  double bubble = 0;     ///< idle between its compute actions
  double cool_down = 0;  ///< idle after its last
};

struct Simulation {
  std::vector<std::vector<Span>> spans;  ///< one for each action, in the order of the schedule's lists
  double length = 0;
  double utilization = 0;  ///< busy time of all ranks divided by (ranks times length)
  std::vector<RankTimes> ranks;
  std::vector<std::int64_t> peak_activations;  ///< see peak_activations()
};

/// Simulates the schedule, with or without messages; a receive waits for its send, and a send for nothing.
/// Takes time linear in the number of actions. Throws InvalidArgument unless there is one finite,
/// non-negative time for each rank, and for a schedule that does not complete, with the action that waits
/// (check() gives more details).
Simulation simulate(const PipelineSchedule& schedule, const StageTimes& times);

/// The most pairs of chunk and micro-batch that each rank holds at once. A pair is held from its F to its B,
/// or to its W if the backward is split.
std::vector<std::int64_t> peak_activations(const PipelineSchedule& schedule);

}  // namespace tranche::pipeline
