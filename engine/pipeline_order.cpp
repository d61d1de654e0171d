#include "engine/pipeline_order.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "engine/stages.h"
#include "pipeline/schedule/check.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/lower.h"
#include "pipeline/schedule/text.h"
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

pipeline::PipelineSchedule read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw ConfigurationError("'" + path + "' is neither a file that can be read nor one of " +
                             pipeline::schedule_names());
  }
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) throw ConfigurationError(path + " cannot be read to its end");
  pipeline::PipelineSchedule schedule = pipeline::read_schedule(text, path);
  if (schedule.rank_of_chunk.front() != 0) {
    throw ConfigurationError(path + ": chunk 0 is on rank " +
                             std::to_string(schedule.rank_of_chunk.front()) +
                             "; the first stage has to hold it, which is line 1");
  }
  return schedule;
}

/// Compute actions alone, or with what a file has beside them.
pipeline::PipelineSchedule read_or_generate(const Config& config, int stages) {
  const std::string& name = config.pipeline_schedule;
  if (pipeline::find_schedule(name) != nullptr) {
    return pipeline::generate(name, stages, config.accumulation_steps, config.pipeline_chunks);
  }
  pipeline::PipelineSchedule schedule = read_file(name);
  pipeline::require_made_for(schedule, stages, config.accumulation_steps, config.pipeline_chunks, name);
  return schedule;
}

}  // namespace

std::vector<int> stages_of_chunks(const Config& config, int stages) {
  return of_key([&] {
    // Without the number of micro-batches, which a plan may not know yet.
    const pipeline::NamedSchedule* const named = pipeline::find_schedule(config.pipeline_schedule);
    if (named == nullptr) return read_or_generate(config, stages).rank_of_chunk;
    return pipeline::ranks_of_chunks(
        named->placement, stages, config.pipeline_chunks > 0 ? config.pipeline_chunks : named->chunks_per_rank);
  });
}

pipeline::PipelineSchedule schedule_of(const Config& config, int stages) {
  return of_key([&] {
    const std::string& name = config.pipeline_schedule;
    pipeline::PipelineSchedule schedule = read_or_generate(config, stages);
    if (name == "breadth-first" && config.stage == 3 && config.gather_for == GatherFor::use) {
      schedule = pipeline::with_gathers(schedule, 1);
    }
    return pipeline::proved(std::move(schedule), pipeline::MessageModel::channels, name);
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

}  // namespace tranche::detail
