#pragma once
/// The named schedules. The orders are those of torch.distributed.pipelining: ScheduleGPipe (afab),
/// Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS (breadth-first), ScheduleInterleavedZeroBubble
/// with one chunk a rank (zb-h1) and ScheduleZBVZeroBubble (zb-v). Breadth-first runs its backward passes in
/// ascending micro-batches, while torch's descend, because weight gradients are always added in ascending
/// order in Tranche.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

struct NamedSchedule {
  std::string_view name;
  std::string_view what;  ///< a few words for help and tables
  ChunkPlacement placement = ChunkPlacement::loop;
  int chunks_per_rank = 1;       ///< if the user sets no number
  bool any_chunks = false;       ///< other numbers are allowed too
  bool splits_backward = false;  ///< input gradients and weight gradients are separate actions
};
/// afab, 1f1b, interleaved, breadth-first, zb-h1 and zb-v.
std::span<const NamedSchedule> named_schedules();
/// Returns null if no schedule has this name.
const NamedSchedule* find_schedule(std::string_view name);
/// The names, separated by commas.
std::string schedule_names();
/// "'zb-h' is no schedule (did you mean zb-h1?); there are ...".
std::string unknown_schedule(std::string_view name);

/// The compute actions of a named schedule. `chunks_per_rank` 0 means the schedule's default. Throws
/// ConfigurationError for an unknown name, numbers below 1 or with more than 2^24 actions, a number of chunks
/// that the schedule does not support, and for interleaved if the number of micro-batches is not a multiple
/// of the stages.
PipelineSchedule generate(std::string_view name, int stages, std::int64_t micro_batches,
                          int chunks_per_rank = 0);

}  // namespace tranche::pipeline
