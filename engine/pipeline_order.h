#pragma once
/// Makes the schedule of a pipeline from the configuration. Private to engine/.

#include <cstdint>
#include <memory>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"
#include "tranche/config/config.h"
#include "tranche/device/device.h"
#include "tranche/engine/model_spec.h"

namespace tranche::detail {

struct Stages;

/// The stage of each chunk of the model under Config::pipeline_schedule and Config::pipeline_chunks. Throws
/// ConfigurationError like schedule_of() for the name, the file and the number of chunks.
std::vector<int> stages_of_chunks(const Config& config, int stages);

/// The actions of each stage in a step of Config::accumulation_steps micro-batches, with messages, for the
/// configured name or file. The schedule has been checked: it is complete, cannot deadlock, and its weight
/// gradients ascend in micro-batches. If stage 3 gathers for use, breadth-first gathers a chunk once for all
/// micro-batches. Throws ConfigurationError for an unknown name, a file that cannot be read or has other
/// numbers, and with check()'s refusal.
pipeline::PipelineSchedule schedule_of(const Config& config, int stages);

/// The same for stages that were divided according to it. Also throws ConfigurationError if the file has
/// changed its chunks since.
std::shared_ptr<const pipeline::PipelineSchedule> schedule_of(const Config& config, const Stages& stages);

/// The most units that a stage holds at once under a schedule that gathers whole chunks; 0 for other
/// schedules.
int units_held(const Stages& stages, const ModelSpec& model);

/// How often a step gathers a unit on a stage under such a schedule. If two chunks hold a unit at once, it is
/// gathered once.
std::int64_t chunk_gathers_of(const Stages& stages, const ModelSpec& model, int stage, int unit);

/// Throws ConfigurationError if, on GPUs, messages would be sent to a stage that is not a neighbour. The
/// first and the last stage are neighbours too (Stages::joins_ends()).
void check_neighbours(const Config& config, int stages, DeviceKind device);

}  // namespace tranche::detail
