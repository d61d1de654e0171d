#pragma once
/// The settings that searches try on a mesh. Private to planner/.

#include <cstdint>
#include <vector>

#include "tranche/planner/planner.h"

namespace tranche::planner {

/// Micro-batches of a step that a trial runs: the first, one between, the last. The choice is run whole.
inline constexpr std::int64_t trial_micro_batches = 3;
/// If a machine's simulation decides, the formula leaves out what it takes for this many times as slow.
inline constexpr double too_dear = 1.5;

/// Everything that is searched on a mesh but the micro-batch.
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
/// The divisors of a data rank's samples of a step, ascending; or the micro-batch that the request keeps.
std::vector<std::int64_t> all_micro_batches(const FitRequest& request, const Config& base);
/// `base` with these settings, whose samples of a step are kept.
Config with_levers(const Config& base, const Levers& levers, std::int64_t micro_batch);

}  // namespace tranche::planner
