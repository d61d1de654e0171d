#pragma once
/// Passes from a schedule to a schedule: compute actions alone, then with messages, then with gathers and
/// frees. Users may enter at any level. Each pass leaves the order of what is there.

#include <cstdint>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// True when any action is a send or a receive; a gather or a free.
bool has_messages(const PipelineSchedule& schedule);
bool has_gathers(const PipelineSchedule& schedule);

/// Adds the messages: a receive in front of the action that reads it, a send behind the one that made it.
/// Between two chunks on one rank nothing is sent. A schedule that has messages, or that needs none, comes
/// back as it is.
PipelineSchedule with_messages(PipelineSchedule schedule);

/// Adds gathers and frees of the chunks' weights, of which a rank holds `capacity` at most. A gather stands
/// in front of the first action that needs the chunk (F, B, I or W), and of its receive. Where there is no
/// room, the chunk whose next use is furthest away is freed in front of the gather; each chunk is freed
/// behind its last use. A schedule that has gathers comes back as it is. Throws InvalidArgument for a
/// capacity below 1.
PipelineSchedule with_gathers(PipelineSchedule schedule, int capacity);

/// The gathers of one rank, or of all.
std::int64_t gathers_of(const std::vector<Action>& actions);
std::int64_t gathers_of(const PipelineSchedule& schedule);

/// A forward pass alone, for evaluation: each chunk in ascending order runs all micro-batches. Without
/// messages.
PipelineSchedule forward_alone(const std::vector<int>& rank_of_chunk, int stages, std::int64_t micro_batches);

}  // namespace tranche::pipeline
