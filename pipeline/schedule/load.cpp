#include "pipeline/schedule/load.h"

#include <filesystem>
#include <system_error>

#include "core/text_file.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/text.h"

namespace tranche::pipeline {

bool names_a_file(const std::string& name_or_file) {
  std::error_code ignored;
  return find_schedule(name_or_file) == nullptr && (name_or_file.find_first_of("/.") != std::string::npos ||
                                                    std::filesystem::exists(name_or_file, ignored));
}

PipelineSchedule load_schedule(const std::string& name_or_file, int stages, std::int64_t micro_batches,
                               int chunks_per_rank, detail::Pipes pipes) {
  if (!names_a_file(name_or_file)) {
    return generate(name_or_file, stages, micro_batches, chunks_per_rank);
  }
  PipelineSchedule schedule =
      read_schedule(detail::read_text_file(name_or_file, "schedule", pipes), name_or_file);
  require_numbers(schedule, name_or_file, stages, micro_batches, chunks_per_rank);
  return schedule;
}

}  // namespace tranche::pipeline
