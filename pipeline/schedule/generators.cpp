#include "pipeline/schedule/generators.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/closest_match.h"
#include "tranche/core/error.h"

namespace tranche::pipeline {

namespace {

using Actions = std::vector<Action>;
constexpr std::int64_t most_actions = std::int64_t{1} << 24;

constexpr std::array named{
    NamedSchedule{"afab", "all forward, then all backward (GPipe)"},
    NamedSchedule{"1f1b", "one forward, one backward in turns (PipeDream-Flush)"},
    NamedSchedule{"interleaved", "1F1B over several chunks on a rank", ChunkPlacement::loop, 2, true},
    NamedSchedule{"breadth-first", "all micro-batches through one chunk after the other",
                  ChunkPlacement::loop, 2, true},
    NamedSchedule{"zb-h1", "1F1B with weight gradients put off into the idle time", ChunkPlacement::loop, 1,
                  false, true},
    NamedSchedule{"zb-v", "two chunks on a rank in the shape of a V, weight gradients put off",
                  ChunkPlacement::v, 2, false, true},
};

/// Counts the micro-batches for which one kind of action on one chunk was appended.
class Counter {
 public:
  Counter(Actions& actions, ActionKind kind, int chunk) : actions_(&actions), kind_(kind), chunk_(chunk) {}
  /// Appends the action for the next micro-batch.
  void next() { actions_->push_back({kind_, chunk_, count_++}); }
  std::int64_t count() const { return count_; }

 private:
  Actions* actions_;
  ActionKind kind_;
  int chunk_;
  std::int64_t count_ = 0;
};

Actions afab(int rank, std::int64_t micro_batches) {
  Actions actions;
  for (const ActionKind kind : {ActionKind::forward, ActionKind::backward}) {
    for (std::int64_t m = 0; m < micro_batches; ++m) actions.push_back({kind, rank, m});
  }
  return actions;
}

/// The warm-up lasts until the last stage's first gradient can arrive.
Actions one_f_one_b(int stages, int rank, std::int64_t micro_batches) {
  Actions actions;
  Counter forward(actions, ActionKind::forward, rank), backward(actions, ActionKind::backward, rank);
  while (forward.count() < std::min<std::int64_t>(stages - 1 - rank, micro_batches)) forward.next();
  while (backward.count() < micro_batches) {
    if (forward.count() < micro_batches) forward.next();
    backward.next();
  }
  return actions;
}

/// Rounds of as many micro-batches as stages pass through the rank's chunks, forward in ascending chunks and
/// backward in descending ones.
Actions interleaved(int stages, int rank, std::int64_t micro_batches, int chunks) {
  Actions actions;
  std::vector<Counter> forward, backward;
  for (int local = 0; local < chunks; ++local) {
    forward.emplace_back(actions, ActionKind::forward, local * stages + rank);
    backward.emplace_back(actions, ActionKind::backward, local * stages + rank);
  }
  const std::int64_t all = micro_batches * chunks;
  const std::int64_t warm_up =
      std::min<std::int64_t>(std::int64_t{chunks - 1} * stages + 2 * (stages - 1 - rank), all);
  const auto turn = [&](std::int64_t step) { return static_cast<std::size_t>(step / stages % chunks); };
  for (std::int64_t step = 0; step < warm_up; ++step) forward[turn(step)].next();
  for (std::int64_t step = 0; step < all; ++step) {
    if (warm_up + step < all) forward[turn(warm_up + step)].next();
    backward[static_cast<std::size_t>(chunks) - 1 - turn(step)].next();
  }
  return actions;
}

Actions breadth_first(int stages, int rank, std::int64_t micro_batches, int chunks) {
  Actions actions;
  for (int local = 0; local < chunks; ++local) {
    for (std::int64_t m = 0; m < micro_batches; ++m)
      actions.push_back({ActionKind::forward, local * stages + rank, m});
  }
  for (int local = chunks - 1; local >= 0; --local) {
    for (std::int64_t m = 0; m < micro_batches; ++m)
      actions.push_back({ActionKind::backward, local * stages + rank, m});
  }
  return actions;
}

/// 1F1B, except that the weight gradients of rank i are i micro-batches behind its input gradients, so that
/// every rank holds activations of as many micro-batches as the first rank.
Actions zb_h1(int stages, int rank, std::int64_t micro_batches) {
  Actions actions;
  Counter forward(actions, ActionKind::forward, rank), input(actions, ActionKind::input_gradient, rank),
      weight(actions, ActionKind::weight_gradient, rank);
  while (forward.count() < std::min<std::int64_t>(stages - 1 - rank, micro_batches)) forward.next();
  while (input.count() < micro_batches) {
    if (forward.count() < micro_batches) forward.next();
    input.next();
    if (input.count() > rank) weight.next();
  }
  while (weight.count() < micro_batches) weight.next();
  return actions;
}

/// Generates the order for at least as many micro-batches as fill the pipeline, then removes actions of
/// micro-batches that do not exist.
Actions zb_v(int stages, int rank, std::int64_t micro_batches) {
  const std::int64_t all = std::max<std::int64_t>(2 * std::int64_t{stages} - 1, micro_batches);
  Actions actions;
  const int down = rank, up = 2 * stages - 1 - rank;  // the two chunks
  Counter f0(actions, ActionKind::forward, down), i0(actions, ActionKind::input_gradient, down),
      w0(actions, ActionKind::weight_gradient, down);
  Counter f1(actions, ActionKind::forward, up), i1(actions, ActionKind::input_gradient, up),
      w1(actions, ActionKind::weight_gradient, up);
  const auto times = [](int count, auto&& step) {
    for (int k = 0; k < count; ++k) step();
  };
  times(2 * (stages - rank) - 1, [&] { f0.next(); });
  times(rank, [&] {
    f1.next();
    f0.next();
  });
  const auto last_chunk = [&] {
    f1.next();
    i1.next();
    w1.next();
  };
  times(stages - rank, last_chunk);
  while (f1.count() < f0.count() || f0.count() < all) {
    if (f0.count() < all) f0.next();
    i0.next();
    w0.next();
    last_chunk();
  }
  times(rank, [&] {
    i0.next();
    i1.next();
  });
  times(stages - rank, [&] {
    i0.next();
    w0.next();
  });
  while (w1.count() < i1.count()) w1.next();
  while (w0.count() < i0.count()) w0.next();
  std::erase_if(actions, [&](const Action& action) { return action.micro_batch >= micro_batches; });
  return actions;
}

void check_numbers(const NamedSchedule& schedule, int stages, std::int64_t micro_batches, int chunks) {
  if (stages < 1 || micro_batches < 1 || chunks < 1) {
    throw ConfigurationError(fmt::format(
        "schedule {}: {} stages, {} micro-batches and {} chunks on a rank: each has to be at least 1",
        schedule.name, stages, micro_batches, chunks));
  }
  if (!schedule.any_chunks && chunks != schedule.chunks_per_rank) {
    throw ConfigurationError(
        fmt::format("schedule {} has {} on a rank, not {}; interleaved and breadth-first have any number",
                    schedule.name, schedule.chunks_per_rank == 1 ? "one chunk" : "two chunks", chunks));
  }
  const std::int64_t kinds = schedule.splits_backward ? 3 : 2;
  // zb_v() generates a list that fills the V before it removes micro-batches that do not exist.
  const std::int64_t made = schedule.placement == ChunkPlacement::v
                                ? std::max<std::int64_t>(2 * std::int64_t{stages} - 1, micro_batches)
                                : micro_batches;
  if (made > most_actions || std::int64_t{stages} * chunks > most_actions / kinds / made) {
    throw ConfigurationError(fmt::format(
        "schedule {}: {} stages, {} micro-batches and {} chunks on a rank take more than {} actions",
        schedule.name, stages, micro_batches, chunks, most_actions));
  }
  if (schedule.name == "interleaved" && micro_batches % stages != 0) {
    const std::int64_t below = micro_batches / stages * stages, above = below + stages;
    throw ConfigurationError(fmt::format(
        "schedule interleaved takes micro-batches in rounds of {}, one for each stage, and {} is no multiple "
        "of it: {} "
        "micro-batches work, and breadth-first takes any number",
        stages, micro_batches, below == 0 ? std::to_string(above) : fmt::format("{} or {}", below, above)));
  }
}

}  // namespace

std::span<const NamedSchedule> named_schedules() {
  return named;
}

const NamedSchedule* find_schedule(std::string_view name) {
  const auto* const found =
      std::find_if(named.begin(), named.end(), [&](const NamedSchedule& one) { return one.name == name; });
  return found == named.end() ? nullptr : found;
}

std::string schedule_names() {
  std::string names;
  for (const NamedSchedule& one : named) names += (names.empty() ? "" : ", ") + std::string(one.name);
  return names;
}

std::string unknown_schedule(std::string_view name) {
  std::vector<std::string> known;
  for (const NamedSchedule& one : named) known.emplace_back(one.name);
  const std::string closest = detail::closest_match(std::string(name), known);
  return fmt::format("'{}' is no schedule{}; there are {}", name,
                     closest.empty() ? "" : " (did you mean " + closest + "?)", schedule_names());
}

PipelineSchedule generate(std::string_view name, int stages, std::int64_t micro_batches,
                          int chunks_per_rank) {
  const NamedSchedule* const found = find_schedule(name);
  if (found == nullptr) throw ConfigurationError(unknown_schedule(name));
  const int chunks = chunks_per_rank == 0 ? found->chunks_per_rank : chunks_per_rank;
  check_numbers(*found, stages, micro_batches, chunks);
  PipelineSchedule schedule;
  schedule.rank_of_chunk = ranks_of_chunks(found->placement, stages, chunks);
  schedule.micro_batches = micro_batches;
  for (int rank = 0; rank < stages; ++rank) {
    schedule.ranks.push_back(name == "afab"            ? afab(rank, micro_batches)
                             : name == "1f1b"          ? one_f_one_b(stages, rank, micro_batches)
                             : name == "interleaved"   ? interleaved(stages, rank, micro_batches, chunks)
                             : name == "breadth-first" ? breadth_first(stages, rank, micro_batches, chunks)
                             : name == "zb-h1"         ? zb_h1(stages, rank, micro_batches)
                                                       : zb_v(stages, rank, micro_batches));
  }
  return schedule;
}

}  // namespace tranche::pipeline
