#pragma once
/// The configurations of a search of meshes and their costs by formula, in ascending order of their seconds.
/// Private to planner/.

#include <cstdint>
#include <functional>
#include <map>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"
#include "planner/mesh_case.h"

namespace tranche::planner {

/// A case, a lever (a combination of all other settings but the micro-batch) and a micro-batch.
struct Candidate {
  double seconds = 0;  ///< by formula; a lower bound over all schedules if not `exact`
  bool exact = false;
  int place = 0, lever = 0;  ///< indices of the case, and in its levers
  std::int64_t micro_batch = 1;
  /// The order of trial: at equal seconds the simplest first, with its largest micro-batch.
  auto key() const { return std::tuple(seconds, exact, place, lever, -micro_batch); }
  friend bool operator>(const Candidate& a, const Candidate& b) { return a.key() > b.key(); }
  using Settings = std::tuple<int, int, std::int64_t>;
  Settings settings() const { return {place, lever, micro_batch}; }
};

/// The queue of a search. For a pipeline the seconds are first a lower bound over all schedules
/// (least_pipelined()); a candidate that reaches the front is put back with the seconds under its own
/// schedule. So next() yields candidates in ascending order of their exact seconds.
///
/// If tranche.host_state is `auto`, the seconds of a candidate with state on nvme count all the host state
/// that its budget could leave, which is a lower bound, until keep_in_host() says what stays.
class MeshCandidates {
 public:
  /// Request and model must outlive it.
  MeshCandidates(const MeshSearchRequest& request, const ModelSpec& spec);

  const std::vector<MeshCase>& cases() const { return cases_; }
  const MeshCase& case_at(const Candidate& one) const { return cases_[static_cast<std::size_t>(one.place)]; }
  const Levers& levers_at(const Candidate& one) const {
    return case_at(one).levers[static_cast<std::size_t>(one.lever)];
  }
  Config config_of(const Candidate& one) const;
  /// Bytes of state on nvme that stay in host memory, in the candidate's configuration from now on.
  void keep_in_host(const Candidate& one, std::int64_t bytes, const std::string& reason);

  /// Queues a lever of a case with each micro-batch.
  void push(int number, int lever) { push_all(number, lever, -1); }
  /// Keeps a lever back until expand() of `before`, which takes more memory and less time.
  void push_after(int number, int lever, int before);
  /// Queues, once, the levers that take less memory and more time than the candidate's, with each micro-batch
  /// that was not refused for the candidate's lever.
  void expand(const Candidate& one);
  /// Takes the next candidate with exact seconds, in ascending order. Returns false if none is below `limit`.
  bool next(Candidate& one, double limit);

  /// Queues a candidate again, with other seconds.
  void put_back(const Candidate& one) { queue_.push(one); }

  /// Counts a candidate as refused, together with the candidates that would be tried after it because they
  /// take less memory.
  void refuse(const Candidate& one, const std::string& reason);
  std::int64_t refused() const { return refusals_; }
  /// The reason of the first mesh or candidate that was refused.
  const std::string& first_refusal() const { return first_refusal_; }

  /// The cost of a step by formula. Until keep_in_host() it counts all the host state that a budget could
  /// leave: no other has fewer bytes on disk, and its seconds are taken as a lower bound, which is not proven
  /// (see with_most_host_state() of planner_fit.cpp). Throws ConfigurationError if the
  /// schedule does not allow the number of micro-batches.
  StepCost formula_cost(const Candidate& one) { return with_schedule(one, alone_cost(one, true)); }
  /// The cost by formula of the candidate as it is planned: until keep_in_host() no state stays.
  StepCost planned_cost(const Candidate& one) { return with_schedule(one, alone_cost(one, false)); }
  /// The cost by the simulation of the request's machine, split as in StepCost.
  StepCost projected(const Candidate& one);
  /// The most micro-batches (of each chunk) that each stage of the candidate's pipeline holds at once. Throws
  /// ConfigurationError if its schedule does not allow their number.
  std::vector<std::int64_t> held_at_once(const Candidate& one);
  const pipeline::PipelineSchedule& schedule_of(const MeshCase& place, std::int64_t micro_batches);

 private:
  void push_all(int number, int lever, int before);
  Config alone_config(const Candidate& one, bool bound) const;
  StepCost alone_cost(const Candidate& one, bool bound) const;
  StepCost with_schedule(const Candidate& one, const StepCost& alone);
  std::vector<int>& kept_back(int number, int lever) {
    return kept_back_[static_cast<std::size_t>(number)][static_cast<std::size_t>(lever)];
  }

  const MeshSearchRequest& request_;
  const FitRequest& fit_;
  const ModelSpec& spec_;
  std::vector<MeshCase> cases_;
  std::vector<std::vector<std::vector<int>>> kept_back_;  ///< by case and lever
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue_;
  std::map<std::tuple<std::string, int, std::int64_t>, pipeline::PipelineSchedule> schedules_;
  std::set<Candidate::Settings> refused_;
  struct HostState {
    std::int64_t bytes = 0;
    std::string reason;
  };
  std::map<Candidate::Settings, HostState> kept_;
  std::int64_t refusals_ = 0;
  std::string first_refusal_;
};

}  // namespace tranche::planner
