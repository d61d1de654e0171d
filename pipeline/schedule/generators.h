#pragma once
/// The schedules that have a name. The orders are those of torch.distributed.pipelining: ScheduleGPipe
/// (afab), Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS (breadth-first),
/// ScheduleInterleavedZeroBubble with one chunk a rank (zb-h1) and ScheduleZBVZeroBubble (zb-v).
/// Breadth-first runs its backward passes in ascending micro-batches, where torch's descend, because sums of
/// weight gradients ascend everywhere in Tranche.

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
  int chunks_per_rank = 1;       ///< where the user gives no number
  bool any_chunks = false;       ///< other numbers are allowed
  bool splits_backward = false;  ///< input gradients and weight gradients are actions of their own
};
/// afab, 1f1b, interleaved, breadth-first, zb-h1 and zb-v.
std::span<const NamedSchedule> named_schedules();
/// Null where `name` is none of them.
const NamedSchedule* find_schedule(std::string_view name);
/// The names, with commas.
std::string schedule_names();
/// "'zb-h' is no schedule (did you mean zb-h1?); there are ...".
std::string unknown_schedule(std::string_view name);

/// The compute actions of a named schedule. `chunks_per_rank` 0 takes the schedule's own number. Throws
/// ConfigurationError for a name that does not exist, numbers below 1 or with more than 2^24 actions, a
/// number of chunks that the schedule does not have, and for interleaved a number of micro-batches that is no
/// multiple of the stages.
PipelineSchedule generate(std::string_view name, int stages, std::int64_t micro_batches,
                          int chunks_per_rank = 0);

}  // namespace tranche::pipeline
