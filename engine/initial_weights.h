#pragma once
/// Draws the initial weights by tensor and element; each rank draws those that it keeps, on any tier. Private
/// to engine/.

#include <cstdint>

#include "engine/state_store.h"
#include "tranche/kernels/workspace.h"

namespace tranche::detail {

/// Draws the weights of all tensors on the device, which determines their bits, in ranges that fit
/// `workspace`, and sets optimizer state to its initial values. Collective over each buffer's group if ranks
/// keep whole parameters but share the optimizer's state (the gather is in progress on return).
void draw_initial_weights(StateStore& store, const Config& config, Device& device,
                          MemoryResource& host_memory, kernels::Workspace workspace);

/// Draws only the weights of frozen tensors, from a seed that may differ from the configuration's. Collective
/// likewise.
void draw_frozen_weights(StateStore& store, const Config& config, std::uint64_t seed, Device& device,
                         MemoryResource& host_memory, kernels::Workspace workspace);

}  // namespace tranche::detail
