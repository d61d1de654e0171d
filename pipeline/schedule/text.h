#pragma once
/// Schedules as text: torch's pipeline CSV (torch.distributed.pipelining), one line for each rank with one
/// action in a cell. Empty cells are idle slots, which say nothing: a schedule is an order, and times follow
/// from it. Lines may also hold messages, gathers and frees, in any of the levels of lower.h.

#include <string>
#include <string_view>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// Reads a schedule. The numbers of ranks, chunks and micro-batches, and the rank of each chunk, follow from
/// the actions; whether the schedule is complete and can run is what the checker says. `file` is the name
/// that errors give. Throws ConfigurationError with the line, its rank and the cell: a cell that is no
/// action, a line without one, a chunk that lies on two ranks or on none, and numbers that so few actions
/// cannot fill.
PipelineSchedule read_schedule(std::string_view text, const std::string& file);

/// The text that read_schedule() reads: a line for each rank, with commas between the actions.
std::string write_schedule(const PipelineSchedule& schedule);

/// Throws ConfigurationError unless a schedule from `file` has these numbers, and says both. A number of 0 is
/// not compared.
void require_numbers(const PipelineSchedule& schedule, const std::string& file, int stages,
                     std::int64_t micro_batches, int chunks_per_rank);

}  // namespace tranche::pipeline
