#pragma once
/// Checks that each rank makes on its own when an engine starts. Private to engine/.

#include <span>
#include <string>

#include "engine/formulas.h"
#include "engine/state_store.h"
#include "tranche/engine/runtime.h"
#include "tranche/optim/optimizer.h"

namespace tranche::detail {

/// True if this run's matrix products may have other bits with another number of threads.
bool threads_change_bits(const Config& config, const Device& device);
/// Throws ConfigurationError if the number of threads depends on the number of ranks although
/// world_size_invariant is set and threads change bits.
void check_threads(const Config& config, const Device& device);
/// Returns Optimizer::routing(). Throws ConfigurationError if no tensor uses the optimizer.
std::string routing_of(const Optimizer& optimizer, std::span<const TensorState> tensors);
/// Why the update of a unit needs the gradients of others first, whatever tranche.update says, as the end of
/// a sentence about the optimizer; empty: it does not. `sums`: the rule asks for some.
std::string need_of_all_gradients(const Optimizer& optimizer, const StateStore& store, bool sums);
/// Throws ConfigurationError where tranche.update: as_reduced is asked for and units cannot be updated so.
void check_update(const Config& config, const Optimizer& optimizer, const StateStore& store, bool sums);
/// Throws InvalidArgument for names and an Optimizer::describe() that no checkpoint can hold, so that it is
/// not the first save, after the training, that refuses them.
void check_storable(const Optimizer& optimizer, const StateStore& store);
/// Throws OutOfMemory if the host has less memory than the state of all ranks of the node needs there.
void check_host_memory(const Runtime& runtime, const Config& config, const StateStore& store,
                       const StateFormulas& formulas);

}  // namespace tranche::detail
