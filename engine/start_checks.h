#pragma once
/// Checks that each rank makes by itself when an engine starts. Private to engine/.

#include <span>
#include <string>

#include "engine/formulas.h"
#include "engine/state_store.h"
#include "tranche/engine/runtime.h"
#include "tranche/optim/optimizer.h"

namespace tranche::detail {

/// Matrix products of this run may have other bits on another number of threads.
bool threads_change_bits(const Config& config, const Device& device);
/// Throws ConfigurationError for a number of threads that follows that of the ranks, where one result is
/// asked for.
void check_threads(const Config& config, const Device& device);
/// Optimizer::routing(). Throws ConfigurationError where the optimizer has nothing to do.
std::string routing_of(const Optimizer& optimizer, std::span<const TensorState> tensors);
/// Why the update of a unit needs the gradients of others first, whatever tranche.update says, as the end of
/// a sentence about the optimizer; empty: it does not. `sums`: the rule asks for some.
std::string need_of_all_gradients(const Optimizer& optimizer, const StateStore& store, bool sums);
/// Throws ConfigurationError where tranche.update: as_reduced is asked for and units cannot be updated so.
void check_update(const Config& config, const Optimizer& optimizer, const StateStore& store, bool sums);
/// Throws OutOfMemory where the host has not the memory that the state takes there on all ranks of the node.
void check_host_memory(const Runtime& runtime, const Config& config, const StateStore& store,
                       const StateFormulas& formulas);

}  // namespace tranche::detail
