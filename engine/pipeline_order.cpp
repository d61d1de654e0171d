#include "engine/pipeline_order.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "engine/stages.h"
#include "pipeline/schedule/check.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/load.h"
#include "pipeline/schedule/lower.h"
#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

/// Calls work(), and puts the key before the text of its errors.
template <typename Work>
auto of_key(const Work& work) {
  try {
    return work();
  } catch (const ConfigurationError& error) {
    throw ConfigurationError("tranche.pipeline_schedule: " + error.message());
  } catch (const InvalidArgument& error) {
    throw ConfigurationError("tranche.pipeline_schedule: " + error.message());
  }
}

/// Loads compute actions, and with a file also its messages, gathers and frees.
pipeline::PipelineSchedule load(const Config& config, int stages) {
  const std::string& name = config.pipeline_schedule;
  pipeline::PipelineSchedule schedule =
      pipeline::load_schedule(name, stages, config.accumulation_steps, config.pipeline_chunks);
  if (schedule.rank_of_chunk.front() == 0) return schedule;
  throw ConfigurationError(name + ": chunk 0 is on rank " + std::to_string(schedule.rank_of_chunk.front()) +
                           "; the first stage has to hold it, whose actions are in line 1");
}

/// Follows a stage's GATHER and FREE actions. Calls gathered(number of chunks by held unit, unit) for each
/// unit that becomes held.
template <typename Gathered>
void hold_units(const Stages& stages, const ModelSpec& model, int stage, const Gathered& gathered) {
  std::map<int, int> held;
  for (const pipeline::Action& action : stages.schedule->ranks.at(static_cast<std::size_t>(stage))) {
    const bool gathers = action.kind == pipeline::ActionKind::gather;
    if (!gathers && action.kind != pipeline::ActionKind::free) continue;
    std::set<int> units;
    for (int i = stages.begin(action.chunk); i < stages.end(model, action.chunk); ++i) {
      units.insert(model.forward[static_cast<std::size_t>(i)].unit.index);
    }
    for (const int unit : units) {
      if (gathers && ++held[unit] == 1) gathered(std::as_const(held), unit);
      if (!gathers && --held[unit] == 0) held.erase(unit);
    }
  }
}

}  // namespace

std::vector<int> stages_of_chunks(const Config& config, int stages) {
  return of_key([&] {
    // The number of micro-batches is not used, because a plan may not know it yet.
    const pipeline::NamedSchedule* const named = pipeline::find_schedule(config.pipeline_schedule);
    if (named == nullptr) return load(config, stages).rank_of_chunk;
    return pipeline::ranks_of_chunks(
        named->placement, stages,
        config.pipeline_chunks > 0 ? config.pipeline_chunks : named->chunks_per_rank);
  });
}

pipeline::PipelineSchedule schedule_of(const Config& config, int stages) {
  return of_key([&] {
    const std::string& name = config.pipeline_schedule;
    pipeline::PipelineSchedule schedule = load(config, stages);
    if (name == "breadth-first" && config.stage == 3 && config.gather_for == GatherFor::use) {
      schedule = pipeline::with_gathers(schedule, 1);
    }
    schedule = pipeline::proved(std::move(schedule), pipeline::MessageModel::channels, name);
    return schedule;
  });
}

std::shared_ptr<const pipeline::PipelineSchedule> schedule_of(const Config& config, const Stages& stages) {
  auto schedule = std::make_shared<const pipeline::PipelineSchedule>(schedule_of(config, stages.count));
  if (schedule->rank_of_chunk == stages.stage_of_chunk) return schedule;
  throw ConfigurationError(
      "tranche.pipeline_schedule: " + config.pipeline_schedule +
      " was changed while the run started: its chunks lie on other stages now; start again");
}

void check_neighbours(const Config& config, int stages, DeviceKind device) {
  if (device == DeviceKind::cpu || device == DeviceKind::meta || stages <= 2) return;
  const std::vector<int> stage_of = stages_of_chunks(config, stages);
  for (std::size_t chunk = 0; chunk + 1 < stage_of.size(); ++chunk) {
    const int here = stage_of[chunk], next = stage_of[chunk + 1];
    if (const int apart = std::abs(next - here); apart <= 1 || apart == stages - 1) continue;
    throw ConfigurationError("tranche.pipeline_schedule \"" + config.pipeline_schedule + "\": chunk " +
                             std::to_string(chunk) + " is on stage " + std::to_string(here) +
                             " and the next one on stage " + std::to_string(next) +
                             "; on GPUs a stage sends messages to the stages before and behind it alone, and "
                             "the last one to the first: place the chunks in a loop or in a V");
  }
}

int units_held(const Stages& stages, const ModelSpec& model) {
  std::size_t most = 0;
  if (stages.schedule == nullptr) return 0;
  for (int stage = 0; stage < stages.count; ++stage) {
    hold_units(stages, model, stage,
               [&](const std::map<int, int>& held, int) { most = std::max(most, held.size()); });
  }
  return static_cast<int>(most);
}

std::int64_t chunk_gathers_of(const Stages& stages, const ModelSpec& model, int stage, int unit) {
  std::int64_t gathers = 0;
  hold_units(stages, model, stage, [&](const std::map<int, int>&, int taken) {
    if (taken == unit) ++gathers;
  });
  return gathers;
}

}  // namespace tranche::detail
