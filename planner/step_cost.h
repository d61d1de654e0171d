#pragma once
/// The formulas behind step_cost(), and a lower bound of a step's memory, for searches that already hold a
/// model's sizes. Private to planner/.

#include <cstdint>
#include <vector>

#include "engine/state_layout.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {

/// The sizes of a model that the formulas use.
struct Sizes {
  double padded = 0;           ///< elements of all flat buffers
  double shard = 0;            ///< elements of this rank's shards
  double gathered_a_pass = 0;  ///< elements gathered in a pass at stage 3, without recomputation
  double block = 0;            ///< elements of a language model's first block
};

/// The number of ranks that share one copy of the weights.
int shards_of(const Config& config, int ranks);
/// The number of ranks that share gradients and optimizer state.
int owners_of(const Config& config, int ranks);
int tensor_ranks_of(const PlanRequest& request, const Config& config);

/// `spec` includes its adapters; `language` is true for a language model.
Sizes sizes_of(const ModelSpec& spec, bool language, const Config& config, int ranks);
/// step_cost() for a complete configuration on a mesh without a pipeline. `spec` and `sizes` belong to the
/// request.
StepCost cost_of(const PlanRequest& request, const Config& config, const ModelSpec& spec, const Sizes& sizes,
                 const CostModel& rates);

/// Bytes of one element in all states of a class, without master weights.
double state_bytes_of(const detail::StateClass& one);

/// Sizes of the flat buffers that a rank holds.
struct HeldState {
  double whole = 0, shard = 0;                  ///< elements of all buffers, and of this rank's shards of
                                                ///< them
  double trained_whole = 0, trained_shard = 0;  ///< the same without frozen tensors
  double state_whole = 0, state_shard = 0;      ///< bytes of their optimizer states
};
/// The sizes for each rank of `which`, in this order. Throws ConfigurationError for a model that the mesh
/// cannot divide.
std::vector<HeldState> held_by(const ModelSpec& spec, const Config& config, int ranks,
                               const std::vector<int>& which);
/// Lower bound of the device memory, in bytes, of every plan: the buffers that a rank holds whatever a step
/// does.
std::int64_t least_state_bytes(const Config& config, int ranks, const HeldState& held);

}  // namespace tranche::planner
