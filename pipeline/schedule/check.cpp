#include "pipeline/schedule/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "pipeline/schedule/lower.h"
#include "tranche/core/error.h"

namespace tranche::pipeline {

namespace {

constexpr std::array<std::string_view, 3> model_names{"async", "channels", "stream"};

/// Kinds that name a micro-batch: F, B, I, W and the four messages.
constexpr std::size_t kinds = 8;
constexpr std::int32_t nowhere = -1;

bool sends(ActionKind kind) {
  return kind == ActionKind::send_residual || kind == ActionKind::send_gradient;
}
bool receives(ActionKind kind) {
  return kind == ActionKind::receive_residual || kind == ActionKind::receive_gradient;
}
bool weighs(ActionKind kind) {
  return kind == ActionKind::backward || kind == ActionKind::weight_gradient;
}

/// The place of each action in the list of its rank, by kind, chunk and micro-batch.
class Places {
 public:
  explicit Places(const PipelineSchedule& schedule) : schedule_(schedule) {
    std::size_t actions = 0;
    for (const std::vector<Action>& line : schedule.ranks) actions += line.size();
    // A complete schedule has more actions than pairs of chunk and micro-batch. In a file with large numbers
    // in it some of the first pairs have no forward, so the others need no place.
    const auto chunks = static_cast<std::size_t>(schedule.chunks());
    const auto micro_batches = static_cast<std::size_t>(schedule.micro_batches);
    all_ = micro_batches <= (actions + 1) / chunks;
    pairs_ = all_ ? chunks * micro_batches : actions + 1;
    for (std::vector<std::int32_t>& of_kind : places_) of_kind.assign(pairs_, nowhere);
  }

  /// False: some pairs have no place here.
  bool all() const { return all_; }
  std::size_t pairs() const { return pairs_; }
  Action action(ActionKind kind, std::size_t pair) const {
    const auto micro_batches = static_cast<std::size_t>(schedule_.micro_batches);
    return {kind, static_cast<int>(pair / micro_batches), static_cast<std::int64_t>(pair % micro_batches)};
  }
  /// Takes the place down. False: the action has one already.
  bool add(const Action& action, std::size_t place) {
    const std::size_t at = pair(action);
    if (at >= pairs_) return true;
    return std::exchange(places_[static_cast<std::size_t>(action.kind)][at],
                         static_cast<std::int32_t>(place)) == nowhere;
  }
  std::int32_t of(const Action& action) const {
    return places_[static_cast<std::size_t>(action.kind)][pair(action)];
  }
  bool has(const Action& action) const { return of(action) != nowhere; }

 private:
  std::size_t pair(const Action& action) const {
    const auto chunk = static_cast<std::size_t>(action.chunk);
    const auto micro_batches = static_cast<std::size_t>(schedule_.micro_batches);
    if (!all_ && chunk > pairs_ / micro_batches) return pairs_;
    const std::size_t at = chunk * micro_batches + static_cast<std::size_t>(action.micro_batch);
    return std::min(at, pairs_);
  }

  const PipelineSchedule& schedule_;
  bool all_ = true;
  std::size_t pairs_ = 0;
  std::array<std::vector<std::int32_t>, kinds> places_;
};

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
  using Step = std::pair<std::size_t, std::size_t>;  // rank, place in its list

  bool refuse(Fault fault, std::string text) {
    verdict_.fault = fault;
    verdict_.refusal = std::move(text);
    return false;
  }
  int rank_of(int chunk) const { return schedule_.rank_of_chunk[static_cast<std::size_t>(chunk)]; }
  const Action& at(const Step& step) const { return schedule_.ranks[step.first][step.second]; }

  /// Each action once, on the rank of its chunk. Computation comes first, because messages follow from it.
  bool place(bool messages) {
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      const std::vector<Action>& line = schedule_.ranks[rank];
      for (std::size_t i = 0; i < line.size(); ++i) {
        if (is_message(line[i].kind) != messages) continue;
        if (!lies_well(line[i], static_cast<int>(rank))) return false;
        if (!computes(line[i].kind) && !messages) continue;  // GATHER and FREE may be there often
        if (!places_.add(line[i], i)) {
          return refuse(Fault::twice,
                        fmt::format("{}: {} of rank {} is there twice", name_, line[i].name(), rank));
        }
      }
    }
    return true;
  }
  /// No I or W beside a B.
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
    const bool down = action.kind == ActionKind::send_residual || action.kind == ActionKind::receive_gradient;
    const int other = down ? action.chunk + 1 : action.chunk - 1;
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
        for (const bool residual : {true, false}) {
          const auto [send, receive] = message(forward.chunk, forward.micro_batch, residual);
          need(send);
          need(receive);
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

  /// The send and the receive of the residual between a chunk and the next, or of its gradient.
  static std::pair<Action, Action> message(int chunk, std::int64_t micro_batch, bool residual) {
    if (residual) {
      return {{ActionKind::send_residual, chunk, micro_batch},
              {ActionKind::receive_residual, chunk + 1, micro_batch}};
    }
    return {{ActionKind::send_gradient, chunk + 1, micro_batch},
            {ActionKind::receive_gradient, chunk, micro_batch}};
  }
  /// The receive of a send, and the send of a receive.
  static Action partner(const Action& action) {
    switch (action.kind) {
      case ActionKind::send_residual:
        return {ActionKind::receive_residual, action.chunk + 1, action.micro_batch};
      case ActionKind::receive_residual:
        return {ActionKind::send_residual, action.chunk - 1, action.micro_batch};
      case ActionKind::send_gradient:
        return {ActionKind::receive_gradient, action.chunk - 1, action.micro_batch};
      default:
        return {ActionKind::send_gradient, action.chunk + 1, action.micro_batch};
    }
  }
  Step place_of(const Action& action) const {
    return {static_cast<std::size_t>(rank_of(action.chunk)), static_cast<std::size_t>(places_.of(action))};
  }
  /// B, or I where it is split.
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
  /// The actions of the same rank whose results an action needs.
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

  /// Runs all ranks at once, each as far as its messages let it.
  bool free_of_deadlock() {
    done_.assign(schedule_.ranks.size(), 0);
    make_channels();
    std::vector<std::size_t> ready(schedule_.ranks.size());
    for (std::size_t rank = 0; rank < ready.size(); ++rank) ready[ready.size() - 1 - rank] = rank;
    while (!ready.empty()) {
      const std::size_t rank = ready.back();
      ready.pop_back();
      const std::vector<Action>& line = schedule_.ranks[rank];
      while (done_[rank] < line.size()) {
        const Action& action = line[done_[rank]];
        if (!is_message(action.kind)) {
          ++done_[rank];
          continue;
        }
        if (!goes(action)) break;
        ++done_[rank];
        const std::size_t other = place_of(partner(action)).first;
        if (model_ == MessageModel::stream) ++done_[other];
        if (model_ == MessageModel::stream || sends(action.kind)) ready.push_back(other);
      }
    }
    for (std::size_t rank = 0; rank < done_.size(); ++rank) {
      if (done_[rank] < schedule_.ranks[rank].size()) return refuse_cycle(rank);
    }
    return true;
  }
  /// True when the message at which its rank stands happens now, and makes it happen.
  bool goes(const Action& action) {
    const Step other = place_of(partner(action));
    if (model_ == MessageModel::stream) return done_[other.first] == other.second;
    if (sends(action.kind)) {
      if (model_ == MessageModel::channels) channel(action).sent.push_back(action);
      return true;
    }
    if (done_[other.first] <= other.second) return false;
    if (model_ == MessageModel::async) return true;
    Channel& from = channel(action);
    if (from.sent[from.received] != partner(action)) return false;
    ++from.received;
    return true;
  }

  struct Channel {
    std::vector<Action> sent;
    std::size_t received = 0;
  };
  void make_channels() {
    std::map<std::tuple<int, int, bool>, std::size_t> numbers;
    channel_of_.clear();
    for (int chunk = 0; chunk + 1 < schedule_.chunks(); ++chunk) {
      const int from = rank_of(chunk), to = rank_of(chunk + 1);
      const auto residual = numbers.try_emplace({from, to, true}, numbers.size()).first->second;
      const auto gradient = numbers.try_emplace({to, from, false}, numbers.size()).first->second;
      channel_of_.push_back({residual, gradient});
    }
    channels_.assign(numbers.size(), {});
  }
  Channel& channel(const Action& action) {
    const bool residual =
        action.kind == ActionKind::send_residual || action.kind == ActionKind::receive_residual;
    const bool below =
        action.kind == ActionKind::receive_residual || action.kind == ActionKind::send_gradient;
    const auto cut = static_cast<std::size_t>(below ? action.chunk - 1 : action.chunk);
    return channels_[residual ? channel_of_[cut].first : channel_of_[cut].second];
  }

  /// Goes from a rank that waits to the rank that it waits for, until one is there again.
  bool refuse_cycle(std::size_t start) {
    struct Link {
      Step waits;  ///< where a rank stands
      Step later;  ///< behind it in the same list: the rank before it in the cycle waits for this
    };
    std::vector<Link> links;
    std::vector<std::size_t> seen(schedule_.ranks.size(), std::numeric_limits<std::size_t>::max());
    std::size_t rank = start;
    while (seen[rank] == std::numeric_limits<std::size_t>::max()) {
      seen[rank] = links.size();
      const Step stands{rank, done_[rank]};
      const Step wanted = place_of(partner(at(stands)));
      if (done_[wanted.first] > wanted.second) {
        // It was sent, but behind another message of its channel that this rank receives later.
        const Channel& from = channel(at(stands));
        const Action& ahead = from.sent[from.received];
        links = {{place_of(ahead), wanted}, {stands, place_of(partner(ahead))}};
        return refuse_cycle_of(links);
      }
      links.push_back({{wanted.first, done_[wanted.first]}, wanted});
      rank = wanted.first;
    }
    links.erase(links.begin(), links.begin() + static_cast<std::ptrdiff_t>(seen[rank]));
    const auto lowest = std::min_element(links.begin(), links.end(), [](const Link& a, const Link& b) {
      return a.waits.first < b.waits.first;
    });
    std::rotate(links.begin(), lowest, links.end());
    return refuse_cycle_of(links);
  }
  /// Each rank waits for where the next one stands; the last of them waits for the first.
  template <class Links>
  bool refuse_cycle_of(const Links& links) {
    std::string chain, list;
    for (const auto& link : links) {
      const std::string stands = at(link.waits).name();
      chain += fmt::format("{} waits for {} of rank {}",
                           chain.empty() ? fmt::format("rank {}", links.back().waits.first) : ", which",
                           stands, link.waits.first);
      list += fmt::format("{}{} and {} behind it on rank {}", list.empty() ? "" : ", ", stands,
                          at(link.later).name(), link.waits.first);
      for (const Step& step : {link.waits, link.later}) {
        verdict_.cycle.push_back({static_cast<int>(step.first), at(step)});
      }
    }
    return refuse(Fault::deadlock, fmt::format("{}: {}: a cycle of {} actions (model {}): {}", name_, chain,
                                               2 * links.size(), name_of(model_), list));
  }

  bool ascending() {
    std::vector<Action> last(schedule_.rank_of_chunk.size(), Action{ActionKind::backward, 0, -1});
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      for (const Action& action : schedule_.ranks[rank]) {
        if (!weighs(action.kind)) continue;
        Action& before = last[static_cast<std::size_t>(action.chunk)];
        if (before.micro_batch > action.micro_batch) {
          return refuse(
              Fault::weights,
              fmt::format("{}: {} of rank {} stands behind {}: the weight gradients of a chunk have "
                          "to be added in ascending micro-batches, so that no schedule changes a bit",
                          name_, action.name(), rank, before.name()));
        }
        before = action;
      }
    }
    return true;
  }

  /// Counts what each rank holds.
  bool bounded() {
    const bool gathers = std::any_of(schedule_.ranks.begin(), schedule_.ranks.end(), [](const auto& line) {
      return std::any_of(line.begin(), line.end(),
                         [](const Action& action) { return action.kind == ActionKind::gather; });
    });
    std::vector<bool> gathered(schedule_.rank_of_chunk.size());
    verdict_.most.assign(schedule_.ranks.size(), {});
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      Held held;
      for (const Action& action : schedule_.ranks[rank]) {
        const auto chunk = static_cast<std::size_t>(action.chunk);
        if (!count(action, gathered, gathers, static_cast<int>(rank), held)) return false;
        gathered[chunk] =
            action.kind == ActionKind::gather || (gathered[chunk] && action.kind != ActionKind::free);
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
    for (std::size_t chunk = 0; chunk < gathered.size(); ++chunk) {
      if (!gathered[chunk]) continue;
      const Action free{ActionKind::free, static_cast<int>(chunk), 0};
      return refuse(Fault::gathering, fmt::format("{} lacks {} at the end of rank {}", name_, free.name(),
                                                  rank_of(free.chunk)));
    }
    return true;
  }
  bool count(const Action& action, const std::vector<bool>& gathered, bool gathers, int rank, Held& held) {
    const bool is_gathered = gathered[static_cast<std::size_t>(action.chunk)];
    const auto wrong = [&](std::string_view why) {
      return refuse(Fault::gathering,
                    fmt::format("{}: {} of rank {} stands where the weights of chunk {} are "
                                "{}gathered{}",
                                name_, action.name(), rank, action.chunk, is_gathered ? "" : "not ", why));
    };
    if (receives(action.kind)) ++held.buffers;
    if (action.kind == ActionKind::gather) {
      if (is_gathered) return wrong(" already");
      ++held.gathered;
    }
    if (action.kind == ActionKind::free) {
      if (!is_gathered) return wrong("");
      --held.gathered;
    }
    if (!computes(action.kind)) return true;
    if (gathers && !is_gathered) return wrong("");
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
  std::vector<std::size_t> done_;  ///< the number of actions that each rank has done
  std::vector<std::pair<std::size_t, std::size_t>> channel_of_;  ///< for each cut, residuals and gradients
  std::vector<Channel> channels_;
};

}  // namespace

std::string_view name_of(MessageModel model) {
  return model_names[static_cast<std::size_t>(model)];
}

MessageModel message_model_named(std::string_view name) {
  for (std::size_t i = 0; i < model_names.size(); ++i) {
    if (model_names[i] == name) return static_cast<MessageModel>(i);
  }
  throw ConfigurationError(
      fmt::format("'{}' is no model of messages: the models are {}", name, fmt::join(model_names, ", ")));
}

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
