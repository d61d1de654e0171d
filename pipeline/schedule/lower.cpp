#include "pipeline/schedule/lower.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::pipeline {

namespace {

template <typename Predicate>
bool has_any(const PipelineSchedule& schedule, Predicate predicate) {
  return std::any_of(schedule.ranks.begin(), schedule.ranks.end(), [&](const std::vector<Action>& line) {
    return std::any_of(line.begin(), line.end(),
                       [&](const Action& action) { return predicate(action.kind); });
  });
}

bool moves_weights(ActionKind kind) {
  return kind == ActionKind::gather || kind == ActionKind::free;
}

constexpr std::size_t never = std::numeric_limits<std::size_t>::max();

/// For each position in a rank's list, the position of the next action that computes on the same chunk;
/// `never` after the last one.
std::vector<std::size_t> next_uses(const std::vector<Action>& line, std::size_t chunks) {
  std::vector<std::size_t> next(line.size(), never), upcoming(chunks, never);
  for (std::size_t at = line.size(); at-- > 0;) {
    if (!computes(line[at].kind)) continue;
    std::size_t& chunk = upcoming[static_cast<std::size_t>(line[at].chunk)];
    next[at] = std::exchange(chunk, at);
  }
  return next;
}

std::vector<Action> gathered(const std::vector<Action>& line, std::size_t chunks, std::size_t capacity) {
  struct Held {
    int chunk;
    std::size_t next_use;
  };
  const std::vector<std::size_t> next = next_uses(line, chunks);
  std::vector<Held> held;
  std::vector<Action> result;
  for (std::size_t at = 0; at < line.size(); ++at) {
    const Action& action = line[at];
    if (!computes(action.kind)) {
      result.push_back(action);
      continue;
    }
    auto own =
        std::find_if(held.begin(), held.end(), [&](const Held& one) { return one.chunk == action.chunk; });
    if (own == held.end()) {
      const bool received =
          !result.empty() && receives(result.back().kind) && result.back().chunk == action.chunk;
      const auto place = [&] { return result.end() - (received ? 1 : 0); };
      if (held.size() == capacity) {
        const auto furthest = std::max_element(
            held.begin(), held.end(), [](const Held& a, const Held& b) { return a.next_use < b.next_use; });
        result.insert(place(), {ActionKind::free, furthest->chunk, 0});
        held.erase(furthest);
      }
      result.insert(place(), {ActionKind::gather, action.chunk, 0});
      held.push_back({action.chunk, never});
      own = held.end() - 1;
    }
    own->next_use = next[at];
    result.push_back(action);
    if (next[at] == never) {
      result.push_back({ActionKind::free, action.chunk, 0});
      held.erase(own);
    }
  }
  return result;
}

}  // namespace

bool has_messages(const PipelineSchedule& schedule) {
  return has_any(schedule, is_message);
}
bool has_gathers(const PipelineSchedule& schedule) {
  return has_any(schedule, moves_weights);
}

PipelineSchedule with_messages(PipelineSchedule schedule) {
  if (has_messages(schedule)) return schedule;
  for (std::vector<Action>& line : schedule.ranks) {
    std::vector<Action> result;
    result.reserve(3 * line.size());
    for (const Action& action : line) {
      const bool from_before = action.chunk > 0 && schedule.crosses(action.chunk - 1);
      const bool to_next = schedule.crosses(action.chunk);
      const auto message = [&](bool crosses, ActionKind kind) {
        if (crosses) result.push_back({kind, action.chunk, action.micro_batch});
      };
      const bool forward = action.kind == ActionKind::forward;
      const bool backward = action.kind == ActionKind::backward || action.kind == ActionKind::input_gradient;
      if (forward) message(from_before, ActionKind::receive_residual);
      if (backward) message(to_next, ActionKind::receive_gradient);
      result.push_back(action);
      if (forward) message(to_next, ActionKind::send_residual);
      if (backward) message(from_before, ActionKind::send_gradient);
    }
    line = std::move(result);
  }
  return schedule;
}

PipelineSchedule with_gathers(PipelineSchedule schedule, int capacity) {
  if (capacity < 1)
    throw InvalidArgument("room for " + std::to_string(capacity) +
                          " gathered chunks: there has to be one at least");
  if (has_gathers(schedule)) return schedule;
  for (std::vector<Action>& line : schedule.ranks) {
    line = gathered(line, schedule.rank_of_chunk.size(), static_cast<std::size_t>(capacity));
  }
  return schedule;
}

std::int64_t gathers_of(const std::vector<Action>& actions) {
  return std::count_if(actions.begin(), actions.end(),
                       [](const Action& action) { return action.kind == ActionKind::gather; });
}

std::int64_t gathers_of(const PipelineSchedule& schedule) {
  std::int64_t all = 0;
  for (const std::vector<Action>& line : schedule.ranks) all += gathers_of(line);
  return all;
}

PipelineSchedule forward_alone(const std::vector<int>& rank_of_chunk, int stages,
                               std::int64_t micro_batches) {
  PipelineSchedule schedule;
  schedule.ranks.resize(static_cast<std::size_t>(stages));
  schedule.rank_of_chunk = rank_of_chunk;
  schedule.micro_batches = micro_batches;
  for (int chunk = 0; chunk < schedule.chunks(); ++chunk) {
    std::vector<Action>& line =
        schedule.ranks.at(static_cast<std::size_t>(rank_of_chunk[static_cast<std::size_t>(chunk)]));
    for (std::int64_t m = 0; m < micro_batches; ++m) line.push_back({ActionKind::forward, chunk, m});
  }
  return schedule;
}

}  // namespace tranche::pipeline
