#include "planner/simulation.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::planner {

namespace {

class Simulation {
 public:
  Simulation(const std::vector<SimulatedTask>& tasks, const std::vector<bool>& ordered,
             const std::vector<double>& capacities)
      : tasks_(tasks),
        ordered_(ordered),
        capacities_(capacities),
        spans_(tasks.size()),
        open_(tasks.size(), 0),
        followers_(tasks.size()),
        ready_(ordered.size()),
        running_(ordered.size(), -1),
        left_(ordered.size(), 0.0),
        lane_cause_(ordered.size(), -1) {
    std::vector<int> last(ordered.size(), -1);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const SimulatedTask& task = tasks[i];
      const int index = static_cast<int>(i);
      if (task.lane < 0 || task.lane >= static_cast<int>(ordered.size())) refuse(index, "has no such lane");
      for (const Claim& claim : task.claims) {
        if (claim.resource < 0 || claim.resource >= static_cast<int>(capacities.size())) {
          refuse(index, "claims no such resource");
        }
      }
      for (const int before : task.after) {
        if (before < 0 || before >= static_cast<int>(tasks.size())) refuse(index, "is after no such task");
        link(before, index);
      }
      const auto lane = static_cast<std::size_t>(task.lane);
      if (ordered[lane] && last[lane] >= 0) link(last[lane], index);
      last[lane] = index;
    }
  }

  std::vector<SimulatedSpan> run() {
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      if (open_[i] == 0) make_ready(static_cast<int>(i), -1);
    }
    while (start_all()) advance();
    if (done_ != tasks_.size()) {
      throw InvalidArgument("a simulation ends with " + std::to_string(tasks_.size() - done_) +
                            " tasks that wait for each other");
    }
    return std::move(spans_);
  }

 private:
  [[noreturn]] static void refuse(int task, const char* why) {
    throw InvalidArgument("simulated task " + std::to_string(task) + " " + why);
  }
  void link(int before, int after) {
    followers_[static_cast<std::size_t>(before)].push_back(after);
    ++open_[static_cast<std::size_t>(after)];
  }
  void make_ready(int index, int cause) {
    spans_[static_cast<std::size_t>(index)].cause = cause;
    ready_[static_cast<std::size_t>(tasks_[static_cast<std::size_t>(index)].lane)].insert({now_, index});
  }

  /// Starts the next task of each idle lane. Returns whether any task runs.
  bool start_all() {
    bool any = false;
    for (std::size_t lane = 0; lane < ordered_.size(); ++lane) {
      if (running_[lane] < 0 && !ready_[lane].empty()) {
        const auto [since, index] = *ready_[lane].begin();
        ready_[lane].erase(ready_[lane].begin());
        SimulatedSpan& span = spans_[static_cast<std::size_t>(index)];
        span.begin = now_;
        if (since < now_)
          span.cause = lane_cause_[lane];  // the lane was busy, so the task before it is the
                                           // cause
        running_[lane] = index;
        left_[lane] = std::max(0.0, tasks_[static_cast<std::size_t>(index)].seconds);
      }
      any |= running_[lane] >= 0;
    }
    return any;
  }

  void advance() {
    std::vector<double> load(capacities_.size(), 0.0);
    for (const int index : running_) {
      if (index < 0) continue;
      for (const Claim& claim : tasks_[static_cast<std::size_t>(index)].claims) {
        load[static_cast<std::size_t>(claim.resource)] += claim.amount;
      }
    }
    std::vector<double> slower(ordered_.size(), 1.0);
    double step = std::numeric_limits<double>::infinity();
    for (std::size_t lane = 0; lane < ordered_.size(); ++lane) {
      if (running_[lane] < 0) continue;
      for (const Claim& claim : tasks_[static_cast<std::size_t>(running_[lane])].claims) {
        const auto r = static_cast<std::size_t>(claim.resource);
        if (claim.amount > 0) slower[lane] = std::max(slower[lane], load[r] / capacities_[r]);
      }
      step = std::min(step, left_[lane] * slower[lane]);
    }
    now_ += step;
    for (std::size_t lane = 0; lane < ordered_.size(); ++lane) {
      if (running_[lane] < 0) continue;
      const double needed = left_[lane] * slower[lane];
      left_[lane] -= step / slower[lane];
      // Tasks whose ends differ only by rounding end together.
      if (needed > step * (1 + 1e-12)) continue;
      finish(lane);
    }
  }

  void finish(std::size_t lane) {
    const int index = std::exchange(running_[lane], -1);
    spans_[static_cast<std::size_t>(index)].end = now_;
    lane_cause_[lane] = index;
    ++done_;
    for (const int follower : followers_[static_cast<std::size_t>(index)]) {
      if (--open_[static_cast<std::size_t>(follower)] == 0) make_ready(follower, index);
    }
  }

  const std::vector<SimulatedTask>& tasks_;
  const std::vector<bool>& ordered_;
  const std::vector<double>& capacities_;
  std::vector<SimulatedSpan> spans_;
  std::vector<int> open_;  ///< by task: number of tasks that it still waits for
  std::vector<std::vector<int>> followers_;
  std::vector<std::set<std::pair<double, int>>> ready_;  ///< by lane: ready tasks, as time at which each was
                                                         ///< ready and index
  std::vector<int> running_;                             ///< by lane: index of the running task, or -1
  std::vector<double> left_;                             ///< by lane: seconds left at full speed
  std::vector<int> lane_cause_;                          ///< by lane: the task that ended last
  double now_ = 0;
  std::size_t done_ = 0;
};

}  // namespace

std::vector<SimulatedSpan> simulate(const std::vector<SimulatedTask>& tasks,
                                    const std::vector<bool>& lane_ordered,
                                    const std::vector<double>& capacities) {
  return Simulation(tasks, lane_ordered, capacities).run();
}

}  // namespace tranche::planner
