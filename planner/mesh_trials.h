#pragma once
/// Plans of a mesh search's candidates on the meta device, and lower bounds of memory that make many of them
/// unnecessary. Private to planner/.

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/mesh_candidates.h"

namespace tranche::planner {

/// The peaks of a configuration on its worst rank: the one with the most bytes beyond the budgets, else with
/// the most device memory.
struct PlannedPeaks {
  std::int64_t device = 0, host = 0, nvme = 0;
  int rank = 0;
  bool all_ranks = false;  ///< false if planning stopped at the first rank that does not fit
};

/// A trial plans a candidate with few micro-batches, once. Its bounds never exceed what a plan finds:
///  - state: least_state_bytes(), which no plan is below;
///  - activations: state plus the activations that a trial of equal stages measured, since they depend on
///    neither the ZeRO stage nor the tier of state;
///  - host memory and nvme: a plan of equal state exceeded the budget.
class MeshTrials {
 public:
  /// Both must outlive it.
  MeshTrials(const MeshSearchRequest& request, MeshCandidates& candidates);

  /// Bytes of device memory that a candidate may take; at first the request's budget.
  std::int64_t room() const { return room_; }
  void set_room(std::int64_t bytes) { room_ = bytes; }

  /// Lower bound of the device memory of a case's worst rank with these levers.
  std::int64_t state_bound(const MeshCase& one, const Levers& levers) const;
  /// The same with the activations, if a plan has measured them.
  std::int64_t bound_of(const Candidate& one, const Config& config) const;
  /// True if a plan of equal state exceeded the budget of host memory or nvme.
  bool lacks_beside(const Candidate& one) const { return lacks_beside_.count(beside_of(one)) > 0; }
  void note_memory_beside(const Candidate& one, const PlannedPeaks& peaks);

  /// The peaks of a trial; each trial is planned at most once. Throws what a run would refuse.
  PlannedPeaks peaks_of_trial(const Candidate& one, bool all_ranks);
  /// The peaks of the whole step, which replace those of the trial. `plan` receives the plan of the worst
  /// rank.
  PlannedPeaks peaks_of_step(const Candidate& one, PlanResult& plan);
  /// The newest peaks of a candidate that was planned.
  const PlannedPeaks& peaks(const Candidate& one) const { return peaks_.at(one.settings()); }
  bool has_peaks(const Candidate& one) const { return peaks_.count(one.settings()) > 0; }

  /// Bytes beyond the budgets, with `room` for the device.
  std::int64_t excess(const PlannedPeaks& peaks, std::int64_t room) const;
  std::int64_t excess(const PlannedPeaks& peaks) const { return excess(peaks, room_); }

  /// Lets state of a candidate that fits and has state on nvme stay in the host memory that its budget
  /// leaves, where the configuration leaves that to `auto`. Returns true, with the candidate back in the
  /// queue, if it takes longer than its seconds said.
  bool keep_in_host(Candidate one);
  /// Does the same, once, for any candidate that was planned, and leaves the queue as it is.
  void resolve(const Candidate& one);

  MeshTrial described(const Candidate& one, const PlannedPeaks& peaks);
  /// Every trial, in the order of the plans.
  std::vector<MeshTrial>& planned() { return planned_; }

 private:
  // Key of activation memory, which depends on neither the ZeRO stage nor the tier of state.
  using Work = std::tuple<int, int, int, std::string, std::size_t, int, std::int64_t, bool, std::int64_t>;
  // Key of host memory and nvme. Micro-batch, checkpointing and head do not change them, nor does the mesh if
  // its ranks hold as much.
  using Beside = std::tuple<int, ReductionPolicy, OffloadTier, OffloadTier, bool, int, double, double>;

  /// True if the request leaves to `auto` what of this candidate's state stays in host memory.
  bool takes_auto(const Candidate& one) const;
  bool resolve(const Candidate& one, bool stop, PlannedPeaks& peaks);
  Work work_of(const Candidate& one) const;
  Beside beside_of(const Candidate& one) const;
  std::int64_t trial_micro_batches_of(const MeshCase& place, std::int64_t micro_batches);
  PlannedPeaks plan_ranks(const Candidate& one, const Config& config, bool whole, bool stop,
                          PlanResult* plan);

  const FitRequest& fit_;
  MeshCandidates& candidates_;
  std::int64_t room_;
  std::map<Work, std::vector<std::int64_t>> activations_;  ///< peak bytes of each rank of the case
  std::map<Candidate::Settings, PlannedPeaks> peaks_;
  std::map<Candidate::Settings, std::size_t> planned_at_;  ///< index in planned_
  std::set<Beside> lacks_beside_;  ///< states whose host memory or nvme exceeds the budget
  std::vector<MeshTrial> planned_;
};

}  // namespace tranche::planner
