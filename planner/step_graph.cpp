#include "planner/step_graph.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::planner {

using detail::RecordedWork;
using detail::WorkKind;
using detail::WorkRecorder;

namespace {

/// Appends the graphs of all ranks, then links their messages and collectives.
class Builder {
 public:
  Builder(const std::vector<RecordedRank>& ranks, WorkCost& costs) : ranks_(ranks), costs_(costs) {}

  StepGraph build() {
    for (std::size_t place = 0; place < ranks_.size(); ++place) add(static_cast<int>(place));
    join_messages();
    join_collectives();
    return std::move(graph_);
  }

 private:
  int append(SimulatedTask task, const RecordedWork* work, int place, double launch, double node_bytes) {
    graph_.tasks.push_back(std::move(task));
    graph_.work.push_back(work);
    graph_.place.push_back(place);
    graph_.launch.push_back(launch);
    graph_.node_bytes.push_back(node_bytes);
    return static_cast<int>(graph_.tasks.size()) - 1;
  }

  void add(int place) {
    const auto& [rank, recorded] = ranks_[static_cast<std::size_t>(place)];
    const WorkRecorder& recorder = *recorded;
    graph_.ranks.push_back(rank);
    const int first_lane = static_cast<int>(graph_.lanes.size());
    const int first_resource = place * rank_resources;
    graph_.capacities.insert(graph_.capacities.end(), rank_resources, 1.0);
    graph_.capacities[static_cast<std::size_t>(first_resource) + cores] = costs_.core_capacity();
    int compute_lane = 0;
    for (const detail::RecordedLane& lane : recorder.lanes()) {
      if (lane.name == "compute" && !recorder.inline_compute()) {
        compute_lane = static_cast<int>(graph_.lanes.size()) - first_lane;
      }
      graph_.lanes.push_back(lane.name);
      graph_.ordered.push_back(lane.ordered);
    }
    graph_.compute_lane.push_back(first_lane + compute_lane);
    std::vector<int> task_of(recorder.work().size(), -1);
    bool begun = false;
    for (std::size_t i = 0; i < recorder.work().size(); ++i) {
      const RecordedWork& work = recorder.work()[i];
      begun |= work.kind == WorkKind::mark;
      if (!begun) continue;  // the first mark begins the recorded steps
      SimulatedTask task;
      task.lane = first_lane + work.lane;
      for (const int before : work.after) {
        const int known = task_of[static_cast<std::size_t>(before)];
        if (known >= 0) task.after.push_back(known);
      }
      task.seconds =
          costs_.seconds(work, rank, recorder.lanes()[static_cast<std::size_t>(work.lane)].name, task.claims);
      for (Claim& claim : task.claims) claim.resource += first_resource;
      double launch = 0;
      if (work.kind == WorkKind::kernel) {
        launch = costs_.launch();
        if (recorder.inline_compute() || work.lane != compute_lane) {
          task.seconds += launch;
        } else {
          // The host issues the kernel and runs ahead of the device.
          SimulatedTask issue;
          issue.lane = first_lane + WorkRecorder::host_lane;
          issue.seconds = launch;
          launch = 0;
          task.after.push_back(append(std::move(issue), nullptr, place, 0, 0));
        }
      }
      task_of[i] = append(std::move(task), &work, place, launch, costs_.node_bytes(work, rank));
      note_joined(work, place, task_of[i]);
    }
  }

  /// Notes messages and collectives in which several ranks take part.
  void note_joined(const RecordedWork& work, int place, int task) {
    if (ranks_.size() == 1) return;
    if (work.kind == WorkKind::send || work.kind == WorkKind::receive) {
      const int other = place_of(work.members->front());
      if (other < 0) throw LogicError("a message to rank " + std::to_string(work.members->front()));
      const bool sends = work.kind == WorkKind::send;
      (sends ? sends_ : receives_)[sends ? std::pair(place, other) : std::pair(other, place)].push_back(task);
    } else if (work.kind == WorkKind::collective) {
      std::vector<int> places;
      for (std::size_t p = 0; p < ranks_.size(); ++p) {
        if (std::find(work.members->begin(), work.members->end(), ranks_[p].rank) != work.members->end()) {
          places.push_back(static_cast<int>(p));
        }
      }
      if (places.size() < 2) return;
      meetings_[{places, static_cast<int>(work.members->size()), work.name}][place].push_back(task);
    }
  }
  int place_of(int rank) const {
    for (std::size_t p = 0; p < ranks_.size(); ++p) {
      if (ranks_[p].rank == rank) return static_cast<int>(p);
    }
    return -1;
  }

  void join_messages() {
    std::map<int, int> received;  // receive of each send
    for (const auto& [pair, sends] : sends_) (void)receives_[pair];
    for (const auto& [pair, receives] : receives_) {
      const std::vector<int>& sends = sends_[pair];
      if (sends.size() != receives.size()) refuse("messages", sends.size(), receives.size());
      for (std::size_t i = 0; i < sends.size(); ++i) received[sends[i]] = receives[i];
    }
    for (SimulatedTask& task : graph_.tasks) {
      for (int& before : task.after) {
        if (const auto found = received.find(before); found != received.end()) before = found->second;
      }
    }
    for (const auto& [send, receive] : received) {
      graph_.tasks[static_cast<std::size_t>(receive)].after.push_back(send);
    }
  }

  /// A collective begins when all of its ranks have reached it: a task of zero length joins them, and their
  /// parts follow it.
  void join_collectives() {
    for (const auto& [group, tasks_of] : meetings_) {
      const std::vector<int>& places = std::get<0>(group);
      const std::vector<int>& first = tasks_of.begin()->second;
      for (const int place : places) {
        const auto found = tasks_of.find(place);
        const std::size_t count = found == tasks_of.end() ? 0 : found->second.size();
        if (count != first.size()) refuse(std::get<2>(group).c_str(), first.size(), count);
      }
      const int lane = static_cast<int>(graph_.lanes.size());
      graph_.lanes.emplace_back("meeting");
      graph_.ordered.push_back(false);
      for (std::size_t i = 0; i < first.size(); ++i) {
        SimulatedTask meeting;
        meeting.lane = lane;
        for (const auto& [place, tasks] : tasks_of) {
          const std::vector<int>& after = graph_.tasks[static_cast<std::size_t>(tasks[i])].after;
          meeting.after.insert(meeting.after.end(), after.begin(), after.end());
        }
        const int met = append(std::move(meeting), nullptr, places.front(), 0, 0);
        for (const auto& [place, tasks] : tasks_of) {
          graph_.tasks[static_cast<std::size_t>(tasks[i])].after = {met};
        }
      }
    }
  }

  [[noreturn]] static void refuse(const char* what, std::size_t here, std::size_t there) {
    throw LogicError("recorded stages of a pipeline do not match: " + std::to_string(here) + " and " +
                     std::to_string(there) + " of " + what);
  }

  const std::vector<RecordedRank>& ranks_;
  WorkCost& costs_;
  StepGraph graph_;
  std::map<std::pair<int, int>, std::vector<int>> sends_, receives_;  ///< by pair of places: sender, receiver
  /// The tasks of each place, by the places that meet, the size of the group, and the operation.
  std::map<std::tuple<std::vector<int>, int, std::string>, std::map<int, std::vector<int>>> meetings_;
};

}  // namespace

StepGraph graph_of(const std::vector<RecordedRank>& ranks, WorkCost& costs) {
  return Builder(ranks, costs).build();
}

}  // namespace tranche::planner
