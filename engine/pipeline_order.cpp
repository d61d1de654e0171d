#include "engine/pipeline_order.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

/// Calls work() and puts the key in front of what it refuses.
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

/// Compute actions alone, or with what a file has beside them.
pipeline::PipelineSchedule load(const Config& config, int stages) {
  const std::string& name = config.pipeline_schedule;
  pipeline::PipelineSchedule schedule =
      pipeline::load_schedule(name, stages, config.accumulation_steps, config.pipeline_chunks);
  if (schedule.rank_of_chunk.front() == 0) return schedule;
  throw ConfigurationError(name + ": chunk 0 is on rank " + std::to_string(schedule.rank_of_chunk.front()) +
                           "; the first stage has to hold it, whose actions are in line 1");
}

}  // namespace

std::vector<int> stages_of_chunks(const Config& config, int stages) {
  return of_key([&] {
    // Without the number of micro-batches, which a plan may not know yet.
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

int units_held(const Stages& stages, const ModelSpec& model) {
  if (stages.schedule == nullptr) return 0;
  std::size_t most = 0;
  for (const std::vector<pipeline::Action>& actions : stages.schedule->ranks) {
    std::multiset<int> units;
    for (const pipeline::Action& action : actions) {
      if (action.kind != pipeline::ActionKind::gather && action.kind != pipeline::ActionKind::free) continue;
      for (int i = stages.begin(action.chunk); i < stages.end(model, action.chunk); ++i) {
        const int unit = model.forward[static_cast<std::size_t>(i)].unit.index;
        if (action.kind == pipeline::ActionKind::gather) {
          units.insert(unit);
        } else if (const auto held = units.find(unit); held != units.end()) {
          units.erase(held);
        }
      }
      most = std::max(most, units.size());
    }
  }
  return static_cast<int>(most);
}

std::int64_t chunk_gathers_of(const Stages& stages, const ModelSpec& model, int unit) {
  std::int64_t gathers = 0;
  for (const std::vector<pipeline::Action>& actions : stages.schedule->ranks) {
    for (const pipeline::Action& action : actions) {
      if (action.kind != pipeline::ActionKind::gather) continue;
      const auto first = model.forward.begin() + stages.begin(action.chunk),
                 end = model.forward.begin() + stages.end(model, action.chunk);
      if (std::any_of(first, end, [&](const UnitUse& use) { return use.unit.index == unit; })) ++gathers;
    }
  }
  return gathers;
}

}  // namespace tranche::detail
