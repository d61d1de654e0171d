#pragma once
#include <cstdint>
#include <string>

#include "core/text_file.h"
#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// True for a text that means a file: it is not a schedule's name, and it has a slash or a dot, or is a
/// file's name.
bool names_a_file(const std::string& name_or_file);

/// Loads the schedule that a user names: one of named_schedules() for these numbers, or a file of schedule
/// text at any level. A file contains its own numbers, which are compared with these numbers unless they are
/// 0. `chunks_per_rank` 0 means the schedule's default. A caller that reads the file only once may allow
/// pipes. Throws ConfigurationError like generate(), read_schedule() and require_numbers(), and for a text
/// that is neither a name nor a readable file.
PipelineSchedule load_schedule(const std::string& name_or_file, int stages, std::int64_t micro_batches,
                               int chunks_per_rank = 0, detail::Pipes pipes = detail::Pipes::refused);

}  // namespace tranche::pipeline
