#include "tests/pipeline/schedule/mutated_schedules.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/lower.h"

namespace tranche::test {

namespace {

using pipeline::Action;
using pipeline::ActionKind;
using pipeline::PipelineSchedule;

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed) {}
  /// A number from 0 to below - 1.
  std::size_t operator()(std::size_t below) { return static_cast<std::size_t>(engine_() % below); }

 private:
  std::mt19937_64 engine_;
};

/// Makes one change, which may have no effect.
void change(PipelineSchedule& schedule, Draw& draw) {
  std::vector<Action>& line = schedule.ranks[draw(schedule.ranks.size())];
  if (line.size() < 2) return;
  const std::size_t at = draw(line.size());
  const auto place = [&](std::vector<Action>& to, std::size_t i) {
    return to.begin() + static_cast<std::ptrdiff_t>(i);
  };
  switch (draw(16)) {
    case 0:  // removes an action
      line.erase(place(line, at));
      return;
    case 1: {  // doubles an action
      const Action action = line[at];
      line.insert(place(line, draw(line.size() + 1)), action);
      return;
    }
    case 2:  // another micro-batch
      line[at].micro_batch =
          static_cast<std::int64_t>(draw(static_cast<std::size_t>(schedule.micro_batches)));
      return;
    case 3:  // another chunk
      line[at].chunk = static_cast<int>(draw(static_cast<std::size_t>(schedule.chunks())));
      return;
    case 4:  // another kind
      line[at].kind = static_cast<ActionKind>(draw(8));
      return;
    case 5: {  // on another rank
      const Action action = line[at];
      line.erase(place(line, at));
      std::vector<Action>& to = schedule.ranks[draw(schedule.ranks.size())];
      to.insert(place(to, draw(to.size() + 1)), action);
      return;
    }
    case 6:  // replaces B by I and W
      if (line[at].kind == ActionKind::backward) {
        line[at].kind = ActionKind::input_gradient;
        Action weights = line[at];
        weights.kind = ActionKind::weight_gradient;
        line.insert(place(line, at + 1 + draw(line.size() - at)), weights);
      }
      return;
    case 7:
    case 8:  // exchanges two actions of a kind, such as two messages of one channel
      for (std::size_t other = at + 1; other < line.size(); ++other) {
        if (line[other].kind != line[at].kind) continue;
        std::swap(line[at], line[other]);
        return;
      }
      return;
    case 9: {  // moves an action anywhere
      const Action action = line[at];
      line.erase(place(line, at));
      line.insert(place(line, draw(line.size() + 1)), action);
      return;
    }
    default: {  // moves an action by a few places
      const std::size_t other = std::min(line.size() - 1, at + 1 + draw(3));
      const Action action = line[at];
      line.erase(place(line, at));
      line.insert(place(line, other), action);
      return;
    }
  }
}

}  // namespace

MutatedSchedule mutated_schedule(std::uint64_t seed) {
  Draw draw(seed);
  constexpr std::array<std::string_view, 6> names{"afab",          "1f1b",  "interleaved",
                                                  "breadth-first", "zb-h1", "zb-v"};
  const std::string_view name = names[draw(names.size())];
  const int stages = static_cast<int>(2 + draw(3));
  std::int64_t micro_batches = static_cast<std::int64_t>(1 + draw(5));
  int chunks = 1;
  if (name == "zb-v") chunks = 2;
  if (name == "breadth-first" || name == "interleaved") chunks = static_cast<int>(2 + draw(2));
  if (name == "interleaved") micro_batches = stages * static_cast<std::int64_t>(1 + draw(2));
  MutatedSchedule mutated;
  mutated.schedule = pipeline::with_messages(pipeline::generate(name, stages, micro_batches, chunks));
  if (draw(4) == 0) mutated.schedule = pipeline::with_gathers(std::move(mutated.schedule), 1);
  const std::size_t changes = draw(5);
  for (std::size_t i = 0; i < changes; ++i) change(mutated.schedule, draw);
  mutated.origin = std::string(name) + ", " + std::to_string(stages) + " stages, " +
                   std::to_string(micro_batches) + " micro-batches, " + std::to_string(chunks) +
                   " chunks on a rank; " + std::to_string(changes) + " changes";
  return mutated;
}

}  // namespace tranche::test
