#pragma once
/// The schedule of a pipeline that a configuration asks for. Private to engine/.

#include <cstdint>
#include <memory>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"
#include "tranche/config/config.h"
#include "tranche/device/device.h"
#include "tranche/engine/model_spec.h"

namespace tranche::detail {

struct Stages;

/// The stage that holds each chunk of the model under Config::pipeline_schedule and Config::pipeline_chunks.
/// Throws ConfigurationError as schedule_of() does for the name, the file and the number of chunks.
std::vector<int> stages_of_chunks(const Config& config, int stages);

/// The actions of each stage in a step of Config::accumulation_steps micro-batches, with its messages, as a
/// name or a file says. The schedule has been checked: it is complete and ends, and weight gradients ascend
/// in micro-batches. Where stage 3 gathers for use, breadth-first gathers a chunk for all micro-batches at
/// once. Throws ConfigurationError for a name that there is not, a file that cannot be read or was made for
/// other numbers, and with the checker's refusal.
pipeline::PipelineSchedule schedule_of(const Config& config, int stages);

/// The same for the stages that were divided by it. Throws ConfigurationError too for a file that has other
/// chunks by now.
std::shared_ptr<const pipeline::PipelineSchedule> schedule_of(const Config& config, const Stages& stages);

/// The most units that a chunk gathers at once under a schedule that gathers whole chunks; 0: none does.
int units_held(const Stages& stages, const ModelSpec& model);

/// How often a step gathers a unit on a stage with the chunks that it is part of, under such a schedule. Two
/// chunks that hold a unit at once gather it once.
std::int64_t chunk_gathers_of(const Stages& stages, const ModelSpec& model, int stage, int unit);

/// Throws ConfigurationError where messages would have to go to a stage that is no neighbour, on GPUs. The
/// first and the last stage are neighbours too (Stages::joins_ends()).
void check_neighbours(const Config& config, int stages, DeviceKind device);

}  // namespace tranche::detail
