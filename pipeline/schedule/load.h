#pragma once
#include <cstdint>
#include <string>

#include "core/text_file.h"
#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// True for a text that means a file: it is no schedule's name, and it has a slash or a dot, or is there.
bool names_a_file(const std::string& name_or_file);

/// The schedule that a user names: one of named_schedules() for these numbers, or a file of schedule text at
/// any level. A file brings its own numbers, and those that are not 0 are compared with them.
/// `chunks_per_rank` 0 takes the schedule's own number. A caller that reads a file once may allow pipes.
/// Throws ConfigurationError as generate(), read_schedule() and require_numbers() do, and for a text that is
/// neither a name nor a file that can be read.
PipelineSchedule load_schedule(const std::string& name_or_file, int stages, std::int64_t micro_batches,
                               int chunks_per_rank = 0, detail::Pipes pipes = detail::Pipes::refused);

}  // namespace tranche::pipeline
