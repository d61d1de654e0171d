#include "pipeline/schedule/deadlock.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "pipeline/schedule/places.h"
#include "tranche/core/error.h"

namespace tranche::pipeline {

namespace {

constexpr std::array<std::string_view, 3> model_names{"async", "channels", "stream"};

/// Simulates all ranks, each as far as its messages allow.
class Rehearsal {
 public:
  Rehearsal(const PipelineSchedule& schedule, const Places& places, MessageModel model)
      : schedule_(schedule), places_(places), model_(model), done_(schedule.ranks.size()) {
    std::map<std::tuple<int, int, bool>, std::size_t> numbers;
    for (std::size_t chunk = 0; chunk + 1 < schedule.rank_of_chunk.size(); ++chunk) {
      const int from = schedule.rank_of_chunk[chunk], to = schedule.rank_of_chunk[chunk + 1];
      const auto residual = numbers.try_emplace({from, to, true}, numbers.size()).first->second;
      const auto gradient = numbers.try_emplace({to, from, false}, numbers.size()).first->second;
      channel_of_.emplace_back(residual, gradient);
    }
    channels_.resize(numbers.size());
  }

  std::vector<RankAction> cycle() {
    run();
    for (std::size_t rank = 0; rank < done_.size(); ++rank) {
      if (done_[rank] < schedule_.ranks[rank].size()) return cycle_from(rank);
    }
    return {};
  }

 private:
  using Step = Places::Step;
  struct Channel {
    std::vector<Action> sent;
    std::size_t received = 0;
  };
  struct Link {
    Step stands;  ///< the action at which a rank waits
    Step later;   ///< a later action of the same list, for which the previous rank in the cycle waits
  };

  const Action& at(const Step& step) const { return schedule_.ranks[step.first][step.second]; }

  void run() {
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
        const std::size_t other = places_.step(partner(action)).first;
        if (model_ == MessageModel::stream) ++done_[other];
        if (model_ == MessageModel::stream || sends(action.kind)) ready.push_back(other);
      }
    }
  }
  /// Returns true if the message at which its rank waits can complete now, and completes it.
  bool goes(const Action& action) {
    const Step other = places_.step(partner(action));
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
  Channel& channel(const Action& action) {
    const bool residual =
        action.kind == ActionKind::send_residual || action.kind == ActionKind::receive_residual;
    const auto cut = static_cast<std::size_t>(std::min(action.chunk, partner(action).chunk));
    return channels_[residual ? channel_of_[cut].first : channel_of_[cut].second];
  }

  /// Follows the ranks from one that waits to the rank that it waits for, until a rank repeats.
  std::vector<RankAction> cycle_from(std::size_t rank) {
    constexpr std::size_t unseen = std::numeric_limits<std::size_t>::max();
    std::vector<Link> links;
    std::vector<std::size_t> seen(schedule_.ranks.size(), unseen);
    while (seen[rank] == unseen) {
      seen[rank] = links.size();
      const Step stands{rank, done_[rank]};
      const Step wanted = places_.step(partner(at(stands)));
      if (done_[wanted.first] > wanted.second) {
        // It was sent, but after another message of its channel that this rank receives later.
        const Channel& from = channel(at(stands));
        const Action& ahead = from.sent[from.received];
        return actions_of({{places_.step(ahead), wanted}, {stands, places_.step(partner(ahead))}});
      }
      links.push_back({{wanted.first, done_[wanted.first]}, wanted});
      rank = wanted.first;
    }
    links.erase(links.begin(), links.begin() + static_cast<std::ptrdiff_t>(seen[rank]));
    const auto lowest = std::min_element(links.begin(), links.end(), [](const Link& a, const Link& b) {
      return a.stands.first < b.stands.first;
    });
    std::rotate(links.begin(), lowest, links.end());
    return actions_of(links);
  }
  std::vector<RankAction> actions_of(const std::vector<Link>& links) const {
    std::vector<RankAction> cycle;
    for (const Link& link : links) {
      for (const Step& step : {link.stands, link.later}) {
        cycle.push_back({static_cast<int>(step.first), at(step)});
      }
    }
    return cycle;
  }

  const PipelineSchedule& schedule_;
  const Places& places_;
  MessageModel model_;
  std::vector<std::size_t> done_;                                ///< by rank: the number of completed actions
  std::vector<std::pair<std::size_t, std::size_t>> channel_of_;  ///< by cut: of residuals and gradients
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

std::vector<RankAction> find_cycle(const PipelineSchedule& schedule, const Places& places,
                                   MessageModel model) {
  return Rehearsal(schedule, places, model).cycle();
}

std::string text_of_cycle(const std::vector<RankAction>& cycle, MessageModel model) {
  std::string chain = fmt::format("rank {}", cycle.back().rank), list;
  for (std::size_t i = 0; i + 1 < cycle.size(); i += 2) {
    const std::string stands = cycle[i].action.name(), later = cycle[i + 1].action.name();
    chain += fmt::format("{} waits for {} of rank {}", i == 0 ? "" : ", which", stands, cycle[i].rank);
    list += fmt::format("{}{} and {} behind it on rank {}", i == 0 ? "" : ", ", stands, later, cycle[i].rank);
  }
  return fmt::format("{}: a cycle of {} actions (model {}): {}", chain, cycle.size(), name_of(model), list);
}

}  // namespace tranche::pipeline
