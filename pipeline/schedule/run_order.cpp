#include "pipeline/schedule/run_order.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::pipeline {

namespace {

using Index = std::int64_t;

int rank_of(const PipelineSchedule& schedule, int chunk) {
  return schedule.rank_of_chunk.at(static_cast<std::size_t>(chunk));
}

const std::vector<Action>& actions_of(const PipelineSchedule& schedule, int rank) {
  return schedule.ranks.at(static_cast<std::size_t>(rank));
}

/// The last action of each micro-batch.
std::vector<Index> last_actions(const std::vector<Action>& actions, std::int64_t micro_batches) {
  std::vector<Index> last(static_cast<std::size_t>(micro_batches), -1);
  for (std::size_t i = 0; i < actions.size(); ++i) {
    if (computes(actions[i].kind) || is_message(actions[i].kind)) {
      last.at(static_cast<std::size_t>(actions[i].micro_batch)) = static_cast<Index>(i);
    }
  }
  return last;
}

using Places = std::vector<std::map<Action, std::size_t>>;
/// The position of each message in the actions of its rank; the index is the rank.
Places places_of_messages(const PipelineSchedule& schedule) {
  Places places(schedule.ranks.size());
  for (std::size_t r = 0; r < places.size(); ++r) {
    for (std::size_t i = 0; i < schedule.ranks[r].size(); ++i) {
      if (is_message(schedule.ranks[r][i].kind)) places[r].emplace(schedule.ranks[r][i], i);
    }
  }
  return places;
}

/// True if the memory of a sent gradient may be reused without waiting for its receiver's progress.
bool frees_at_once(const PipelineSchedule& schedule) {
  return schedule.chunks() == schedule.stages();
}

/// For each action of rank `of`, the last action of rank `needed` that must complete before it; -1: none. A
/// send of a gradient may wait for memory until its receiver has reached the receive.
std::vector<Index> last_needed(const PipelineSchedule& schedule, int of, int needed) {
  const std::size_t ranks = schedule.ranks.size();
  const Places places = places_of_messages(schedule);
  std::vector<std::vector<Index>> result(ranks);  // of the actions processed so far
  std::map<Action, Index> sent;                   // by receive
  const auto before = [&](std::size_t rank, std::size_t action) {
    return action == 0 ? Index{-1} : result[rank][action - 1];
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t r = 0; r < ranks; ++r) {
      const std::vector<Action>& actions = schedule.ranks[r];
      for (std::size_t i = result[r].size(); i < actions.size(); ++i) {
        Index last = before(r, i);
        if (receives(actions[i].kind)) {
          const auto found = sent.find(actions[i]);
          if (found == sent.end()) break;
          last = std::max(last, found->second);
        }
        if (static_cast<int>(r) == needed) last = static_cast<Index>(i);
        if (sends(actions[i].kind)) sent[partner(actions[i])] = last;
        if (actions[i].kind == ActionKind::send_gradient && frees_at_once(schedule)) {
          const auto peer = static_cast<std::size_t>(peer_of(schedule, actions[i]));
          const std::size_t receive = places[peer].at(partner(actions[i]));
          if (result[peer].size() < receive) break;
          // The receiver must have begun the receive, so all actions before it must be complete.
          last = std::max(
              last, static_cast<int>(peer) == needed ? static_cast<Index>(receive) : before(peer, receive));
        }
        result[r].push_back(last);
        moved = true;
      }
    }
  }
  if (result[static_cast<std::size_t>(of)].size() < actions_of(schedule, of).size()) {
    throw LogicError("the schedule does not come to its end");
  }
  return result[static_cast<std::size_t>(of)];
}

/// The action of the rank after which each micro-batch ends: after its last action, and in ascending order.
std::vector<Index> own_ends(const PipelineSchedule& schedule, int rank) {
  std::vector<Index> ends = last_actions(actions_of(schedule, rank), schedule.micro_batches);
  for (std::size_t m = 0; m < ends.size(); ++m) {
    if (ends[m] < 0) throw LogicError("the schedule leaves micro-batch " + std::to_string(m) + " out");
    if (m > 0) ends[m] = std::max(ends[m], ends[m - 1]);
  }
  return ends;
}

void find_ends(RunOrder& order, const PipelineSchedule& schedule, int rank) {
  std::vector<Index> ends = own_ends(schedule, rank);
  const int first = rank_of(schedule, 0), last = rank_of(schedule, schedule.chunks() - 1);
  if (first != last && (rank == first || rank == last)) {
    const int other = rank == first ? last : first;
    std::vector<Index> others = own_ends(schedule, other);
    const std::vector<Index> own_needed = last_needed(schedule, other, rank),
                             other_needed = last_needed(schedule, rank, other);
    // A later end on one rank may make the end on the other rank later too. Both ranks compute the same
    // result.
    for (std::size_t m = 0; m < ends.size(); ++m) {
      for (Index before = -1; before != ends[m];) {
        before = ends[m];
        others[m] = std::max(others[m], other_needed[static_cast<std::size_t>(ends[m])]);
        ends[m] = std::max(ends[m], own_needed[static_cast<std::size_t>(others[m])]);
      }
    }
  }
  for (std::size_t m = 0; m < ends.size(); ++m) {
    order.ends[static_cast<std::size_t>(ends[m])].push_back(static_cast<std::int64_t>(m));
  }
}

void find_taken(RunOrder& order, const PipelineSchedule& schedule, int rank) {
  const std::vector<Action>& own = actions_of(schedule, rank);
  const Places place = places_of_messages(schedule);
  std::vector<std::vector<std::size_t>> waiting(schedule.ranks.size());  // own sends, by receiver
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (!is_message(own[i].kind)) continue;
    const auto peer = static_cast<std::size_t>(peer_of(schedule, own[i]));
    if (own[i].kind == ActionKind::send_gradient) waiting[peer].push_back(i);
    if (!receives(own[i].kind)) continue;
    const std::size_t sent_at = place[peer].at(partner(own[i]));
    std::erase_if(waiting[peer], [&](std::size_t send) {
      const bool taken = place[peer].at(partner(own[send])) < sent_at;
      if (taken) order.taken[i].push_back(send);
      return taken;
    });
  }
}

void find_early_weights(RunOrder& order, const PipelineSchedule& schedule, int rank) {
  std::vector<int> chunks;  // of the rank, ascending
  for (int chunk = 0; chunk < schedule.chunks(); ++chunk) {
    if (rank_of(schedule, chunk) == rank) chunks.push_back(chunk);
  }
  std::set<std::pair<int, std::int64_t>> done;
  std::set<std::pair<int, int>> found;
  for (const Action& action : actions_of(schedule, rank)) {
    if (action.kind != ActionKind::backward && action.kind != ActionKind::weight_gradient) continue;
    done.emplace(action.chunk, action.micro_batch);
    for (auto later = std::upper_bound(chunks.begin(), chunks.end(), action.chunk); later != chunks.end();
         ++later) {
      if (done.contains({*later, action.micro_batch})) continue;
      if (found.emplace(action.chunk, *later).second) order.early_weights.push_back({action, *later});
    }
  }
}

}  // namespace

int peer_of(const PipelineSchedule& schedule, const Action& message) {
  return rank_of(schedule, partner(message).chunk);
}

RunOrder run_order(const PipelineSchedule& schedule, int rank) {
  RunOrder order;
  order.ends.resize(actions_of(schedule, rank).size());
  order.taken.resize(order.ends.size());
  order.incoming.resize(schedule.ranks.size());
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r) {
    for (const Action& action : schedule.ranks[r]) {
      if (sends(action.kind) && peer_of(schedule, action) == rank)
        order.incoming[r].push_back(partner(action));
    }
  }
  find_ends(order, schedule, rank);
  if (!frees_at_once(schedule)) find_taken(order, schedule, rank);
  find_early_weights(order, schedule, rank);
  return order;
}

}  // namespace tranche::pipeline
