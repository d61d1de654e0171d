#pragma once
/// The settings that a search varies on one mesh, called levers. Private to planner/.

#include <cstdint>
#include <vector>

#include "tranche/planner/planner.h"

namespace tranche::planner {

/// Micro-batches of a trial step: the first, one in the middle, the last. The chosen configuration is planned
/// with all of its micro-batches.
inline constexpr std::int64_t trial_micro_batches = 3;
/// If a machine's simulation decides, candidates that the formula calls this many times slower are not
/// simulated.
inline constexpr double too_dear = 1.5;

/// All settings that are searched on a mesh, except the micro-batch.
struct Levers {
  int stage = 0;
  ReductionPolicy reduction = ReductionPolicy::boundary;
  int checkpoint_every = 0;  ///< 0: no activation checkpointing
  std::int64_t vocabulary_chunk = 0;
  OffloadTier optimizer = OffloadTier::none, parameters = OffloadTier::none;
  bool activations = false;
};

std::vector<ReductionPolicy> all_policies(const FitRequest& request, const Config& base);
/// The values of each lever that are worth a trial on the mesh of `base`, simplest first. `base` is the
/// request's configuration on any mesh, and complete.
std::vector<Levers> all_levers(const FitRequest& request, const Config& base);
/// The divisors of the samples of a data rank's step, ascending; or only the micro-batch that the request
/// keeps.
std::vector<std::int64_t> all_micro_batches(const FitRequest& request, const Config& base);
/// `base` with these settings and this micro-batch; the number of samples of a step does not change.
Config with_levers(const Config& base, const Levers& levers, std::int64_t micro_batch);
/// A trial with these settings; its other members are still to be set.
FitTrial trial_of(const Levers& levers);

}  // namespace tranche::planner
