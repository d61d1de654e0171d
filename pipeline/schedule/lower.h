#pragma once
/// Lowers a schedule: from compute actions alone, to one with messages, to one with gathers and frees. Users
/// may start at any level. Each pass keeps the order of existing actions.

#include <cstdint>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// True when any action is a send or a receive.
bool has_messages(const PipelineSchedule& schedule);
bool has_gathers(const PipelineSchedule& schedule);

/// Adds the messages: a receive before the action that reads it, a send after the one that produced it.
/// Chunks on the same rank need no messages. A schedule that already has messages, or needs none, is returned
/// unchanged.
PipelineSchedule with_messages(PipelineSchedule schedule);

/// Adds gathers and frees of chunks' weights, of which a rank holds at most `capacity`. A gather precedes the
/// first action that needs the chunk (F, B, I or W), and that action's receive. If the rank is full, the
/// chunk whose next use is furthest away is freed before the gather; each chunk is freed after its last use.
/// A schedule that already has gathers is returned unchanged. Throws InvalidArgument for a capacity below 1.
PipelineSchedule with_gathers(PipelineSchedule schedule, int capacity);

/// The number of gathers of one rank, or of all ranks.
std::int64_t gathers_of(const std::vector<Action>& actions);
std::int64_t gathers_of(const PipelineSchedule& schedule);

/// A forward pass alone, for evaluation: each chunk in ascending order runs all micro-batches. It has no
/// messages.
PipelineSchedule forward_alone(const std::vector<int>& rank_of_chunk, int stages, std::int64_t micro_batches);

}  // namespace tranche::pipeline
