#include "pipeline/schedule/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "pipeline/schedule/lower.h"
#include "pipeline/schedule/places.h"
#include "tranche/core/error.h"

namespace tranche::pipeline {

namespace {

bool weighs(ActionKind kind) {
  return kind == ActionKind::backward || kind == ActionKind::weight_gradient;
}

class Checker {
 public:
  Checker(const PipelineSchedule& schedule, MessageModel model, std::string_view name, const Limits& limits)
      : schedule_(schedule), model_(model), name_(name), limits_(limits), places_(schedule) {}

  Verdict run() {
    if (place(false) && halved_once() && place(true) && complete() && causal() && free_of_deadlock() &&
        ascending() && bounded())
      return verdict_;
    verdict_.most.clear();
    return verdict_;
  }

 private:
  bool refuse(Fault fault, std::string text) {
    verdict_.fault = fault;
    verdict_.refusal = std::move(text);
    return false;
  }
  int rank_of(int chunk) const { return schedule_.rank_of_chunk[static_cast<std::size_t>(chunk)]; }

  /// Records each action once, on its chunk's rank. Compute actions are first, because messages depend on
  /// them.
  bool place(bool messages) {
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      const std::vector<Action>& line = schedule_.ranks[rank];
      for (std::size_t i = 0; i < line.size(); ++i) {
        if (is_message(line[i].kind) != messages) continue;
        if (!lies_well(line[i], static_cast<int>(rank))) return false;
        if (!computes(line[i].kind) && !messages) continue;  // GATHER and FREE may be repeated
        if (!places_.add(line[i], i)) {
          return refuse(Fault::twice,
                        fmt::format("{}: {} of rank {} is there twice", name_, line[i].name(), rank));
        }
      }
    }
    return true;
  }
  /// Checks that no I or W exists for a B.
  bool halved_once() {
    for (std::size_t pair = 0; pair < places_.pairs(); ++pair) {
      const Action whole = places_.action(ActionKind::backward, pair);
      if (!places_.has(whole)) continue;
      for (const ActionKind kind : {ActionKind::input_gradient, ActionKind::weight_gradient}) {
        const Action half = places_.action(kind, pair);
        if (!places_.has(half)) continue;
        return refuse(Fault::twice,
                      fmt::format("{}: {} of rank {} is there beside {}, which holds both halves", name_,
                                  half.name(), rank_of(half.chunk), whole.name()));
      }
    }
    return true;
  }
  bool lies_well(const Action& action, int rank) {
    const auto misplaced = [&](const std::string& why) {
      return refuse(Fault::misplaced, fmt::format("{}: {} of rank {}: {}", name_, action.name(), rank, why));
    };
    if (action.chunk < 0 || action.chunk >= schedule_.chunks()) {
      return misplaced(fmt::format("the chunks are 0 to {}", schedule_.chunks() - 1));
    }
    if (action.micro_batch < 0 || action.micro_batch >= schedule_.micro_batches) {
      return misplaced(fmt::format("the micro-batches are 0 to {}", schedule_.micro_batches - 1));
    }
    if (rank_of(action.chunk) != rank) {
      return misplaced(fmt::format("chunk {} lies on rank {}", action.chunk, rank_of(action.chunk)));
    }
    if (!is_message(action.kind)) return true;
    const int other = partner(action).chunk;
    const bool down = other > action.chunk;
    if (other < 0 || other == schedule_.chunks()) {
      return misplaced(fmt::format("there is no chunk {} the {} one", down ? "behind" : "before",
                                   down ? "last" : "first"));
    }
    if (rank_of(other) == rank) {
      return misplaced(fmt::format("chunk {} lies on this rank too, so there is no message", other));
    }
    return true;
  }

  bool complete() {
    std::int64_t count = 0;
    Action first;
    const auto need = [&](const Action& action) {
      if (places_.has(action)) return;
      if (count++ == 0) first = action;
    };
    for (std::size_t pair = 0; pair < places_.pairs(); ++pair) {
      const auto named = [&](ActionKind kind) { return places_.action(kind, pair); };
      const Action whole = named(ActionKind::backward), input = named(ActionKind::input_gradient),
                   weights = named(ActionKind::weight_gradient);
      need(named(ActionKind::forward));
      if (places_.has(whole)) continue;
      if (places_.has(input) || places_.has(weights)) {
        need(input);
        need(weights);
      } else {
        need(whole);
      }
    }
    if (count == 0) {
      for (std::size_t pair = 0; pair < places_.pairs(); ++pair) {
        const Action forward = places_.action(ActionKind::forward, pair);
        if (!schedule_.crosses(forward.chunk)) continue;
        for (const Action& send :
             {Action{ActionKind::send_residual, forward.chunk, forward.micro_batch},
              Action{ActionKind::send_gradient, forward.chunk + 1, forward.micro_batch}}) {
          need(send);
          need(partner(send));
        }
      }
    }
    if (count == 0) return true;
    std::string others;
    if (count > 1) {
      others = places_.all() ? fmt::format(" and {} other action{}", count - 1, count == 2 ? "" : "s")
                             : std::string(" and others");
    }
    return refuse(Fault::missing, fmt::format("{} lacks {}{}", name_, first.name(), others));
  }

  /// B, or I if the backward is split.
  Action input_gradient(int chunk, std::int64_t micro_batch) const {
    const Action whole{ActionKind::backward, chunk, micro_batch};
    return places_.has(whole) ? whole : Action{ActionKind::input_gradient, chunk, micro_batch};
  }

  bool causal() {
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      for (const Action& action : schedule_.ranks[rank]) {
        for (const std::optional<Action>& needed : needs(action)) {
          if (!needed || places_.of(*needed) < places_.of(action)) continue;
          return refuse(Fault::order, fmt::format("{}: {} of rank {} stands before {}, whose result it needs",
                                                  name_, action.name(), rank, needed->name()));
        }
      }
    }
    return true;
  }
  /// The actions of the same rank whose results this action needs.
  std::array<std::optional<Action>, 2> needs(const Action& action) const {
    const int chunk = action.chunk;
    const std::int64_t micro_batch = action.micro_batch;
    const Action forward{ActionKind::forward, chunk, micro_batch};
    switch (action.kind) {
      case ActionKind::forward:
        if (chunk == 0) return {};
        if (schedule_.crosses(chunk - 1)) return {Action{ActionKind::receive_residual, chunk, micro_batch}};
        return {Action{ActionKind::forward, chunk - 1, micro_batch}};
      case ActionKind::backward:
      case ActionKind::input_gradient:
        if (!schedule_.has_next(chunk)) return {forward};
        if (schedule_.crosses(chunk)) {
          return {forward, Action{ActionKind::receive_gradient, chunk, micro_batch}};
        }
        return {forward, input_gradient(chunk + 1, micro_batch)};
      case ActionKind::weight_gradient:
        return {Action{ActionKind::input_gradient, chunk, micro_batch}};
      case ActionKind::send_residual:
        return {forward};
      case ActionKind::send_gradient:
        return {input_gradient(chunk, micro_batch)};
      default:
        return {};
    }
  }

  bool free_of_deadlock() {
    verdict_.cycle = find_cycle(schedule_, places_, model_);
    if (verdict_.cycle.empty()) return true;
    return refuse(Fault::deadlock, fmt::format("{}: {}", name_, text_of_cycle(verdict_.cycle, model_)));
  }

  /// Checks that sums of gradients have one order. Gradients of norms and of the head may be added together
  /// with input gradients.
  bool ascending() {
    const Action none{ActionKind::backward, 0, -1};
    std::vector<Action> last_input(schedule_.rank_of_chunk.size(), none), last_weights = last_input;
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      for (const Action& action : schedule_.ranks[rank]) {
        if (!computes(action.kind) || action.kind == ActionKind::forward) continue;
        const auto chunk = static_cast<std::size_t>(action.chunk);
        const auto comes_next = [&](Action& before, std::string_view what) {
          if (before.micro_batch > action.micro_batch) {
            return refuse(
                Fault::gradients,
                fmt::format("{}: {} of rank {} stands behind {}: the {} gradients of a chunk have to be "
                            "computed in ascending micro-batches, so that no schedule changes a bit",
                            name_, action.name(), rank, before.name(), what));
          }
          before = action;
          return true;
        };
        if (weighs(action.kind) && !comes_next(last_weights[chunk], "weight")) return false;
        if (action.kind != ActionKind::weight_gradient && !comes_next(last_input[chunk], "input"))
          return false;
      }
    }
    return true;
  }

  /// Counts what each rank holds at once, and compares it with the limits.
  bool bounded() {
    const bool gathers = std::any_of(schedule_.ranks.begin(), schedule_.ranks.end(), [](const auto& line) {
      return std::any_of(line.begin(), line.end(),
                         [](const Action& action) { return action.kind == ActionKind::gather; });
    });
    std::vector<Weights> weights(schedule_.rank_of_chunk.size(), Weights::away);
    verdict_.most.assign(schedule_.ranks.size(), {});
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      Held held;
      for (const Action& action : schedule_.ranks[rank]) {
        const auto chunk = static_cast<std::size_t>(action.chunk);
        if (!count(action, weights[chunk], gathers, static_cast<int>(rank), held)) return false;
        Held& most = verdict_.most[rank];
        most.activations = std::max(most.activations, held.activations);
        most.buffers = std::max(most.buffers, held.buffers);
        most.gathered = std::max(most.gathered, held.gathered);
        if (!within(limits_.activations, held.activations, "pair", " of chunk and micro-batch", action,
                    rank) ||
            !within(limits_.buffers, held.buffers, "message", " received and not read", action, rank) ||
            !within(limits_.gathered, held.gathered, "chunk", " gathered", action, rank)) {
          return false;
        }
      }
    }
    for (std::size_t chunk = 0; chunk < weights.size(); ++chunk) {
      if (weights[chunk] == Weights::away) continue;
      const Action free{ActionKind::free, static_cast<int>(chunk), 0};
      return refuse(Fault::gathering, fmt::format("{} lacks {} at the end of rank {}", name_, free.name(),
                                                  rank_of(free.chunk)));
    }
    return true;
  }
  enum class Weights : std::uint8_t { away, gathered, used };
  bool count(const Action& action, Weights& weights, bool gathers, int rank, Held& held) {
    const auto wrong = [&](std::string_view state) {
      return refuse(Fault::gathering,
                    fmt::format("{}: {} of rank {} stands where the weights of chunk {} are {}", name_,
                                action.name(), rank, action.chunk, state));
    };
    if (receives(action.kind)) ++held.buffers;
    if (action.kind == ActionKind::gather) {
      if (weights != Weights::away) return wrong("gathered already");
      weights = Weights::gathered;
      ++held.gathered;
    }
    if (action.kind == ActionKind::free) {
      if (weights == Weights::away) return wrong("not gathered");
      if (weights == Weights::gathered) return wrong("gathered and not used yet");
      weights = Weights::away;
      --held.gathered;
    }
    if (!computes(action.kind)) return true;
    if (gathers && weights == Weights::away) return wrong("not gathered");
    if (gathers) weights = Weights::used;
    if (action.kind == ActionKind::forward) {
      ++held.activations;
      if (action.chunk > 0 && schedule_.crosses(action.chunk - 1)) --held.buffers;
    } else if (action.kind != ActionKind::weight_gradient && schedule_.crosses(action.chunk)) {
      --held.buffers;
    }
    if (weighs(action.kind)) --held.activations;
    return true;
  }
  bool within(const std::optional<std::int64_t>& limit, std::int64_t held, std::string_view what,
              std::string_view state, const Action& action, std::size_t rank) {
    if (!limit || held <= *limit) return true;
    return refuse(Fault::limit,
                  fmt::format("{}: rank {} holds {} {}{}{} at {}, and the limit is {}", name_, rank, held,
                              what, held == 1 ? "" : "s", state, action.name(), *limit));
  }

  const PipelineSchedule& schedule_;
  MessageModel model_;
  std::string_view name_;
  const Limits& limits_;
  Places places_;
  Verdict verdict_;
};

}  // namespace

Verdict check(const PipelineSchedule& lowered, MessageModel model, std::string_view name,
              const Limits& limits) {
  const auto refused = [&](Fault fault, std::string text) {
    Verdict verdict;
    verdict.fault = fault;
    verdict.refusal = std::move(text);
    return verdict;
  };
  std::vector<bool> holds(lowered.ranks.size());
  for (const int rank : lowered.rank_of_chunk) {
    if (rank < 0 || rank >= lowered.stages()) {
      throw InvalidArgument(
          fmt::format("a chunk on rank {} of a pipeline of {} stages", rank, lowered.stages()));
    }
    holds[static_cast<std::size_t>(rank)] = true;
  }
  if (lowered.chunks() == 0 || lowered.micro_batches < 1) {
    return refused(Fault::missing, fmt::format("{} lacks actions: it has {} chunks and {} micro-batches",
                                               name, lowered.chunks(), lowered.micro_batches));
  }
  const auto empty = std::find(holds.begin(), holds.end(), false);
  if (empty != holds.end()) {
    return refused(Fault::missing,
                   fmt::format("{} lacks actions of rank {}: each rank of a pipeline has a chunk", name,
                               empty - holds.begin()));
  }
  return Checker(lowered, model, name, limits).run();
}

PipelineSchedule proved(PipelineSchedule schedule, MessageModel model, std::string_view name,
                        const Limits& limits) {
  schedule = with_messages(std::move(schedule));
  Verdict verdict = check(schedule, model, name, limits);
  if (!verdict.accepted()) throw ConfigurationError(std::move(verdict.refusal));
  return schedule;
}

}  // namespace tranche::pipeline
