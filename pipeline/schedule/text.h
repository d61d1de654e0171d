#pragma once
/// Schedules as text: torch's pipeline CSV (torch.distributed.pipelining), one line for each rank with one
/// action in a cell. Empty cells are idle slots and have no effect, because a schedule is only an order.
/// Lines may also contain messages, gathers and frees, at any of the levels of lower.h.

#include <string>
#include <string_view>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// Reads a schedule. The numbers of ranks, chunks and micro-batches, and the rank of each chunk, follow from
/// the actions; check() decides whether the schedule is complete and can run. Errors name `file`. Throws
/// ConfigurationError with the line, its rank and the cell, for a cell that is not an action, a line without
/// one, a chunk on two ranks or on none, and numbers that so few actions cannot fill.
PipelineSchedule read_schedule(std::string_view text, const std::string& file);

/// The text in the format of read_schedule(): a line for each rank, with commas between the actions.
std::string write_schedule(const PipelineSchedule& schedule);

/// Throws ConfigurationError with both numbers unless a schedule from `file` has these numbers. A 0 is not
/// compared.
void require_numbers(const PipelineSchedule& schedule, const std::string& file, int stages,
                     std::int64_t micro_batches, int chunks_per_rank);

}  // namespace tranche::pipeline
