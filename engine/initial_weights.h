#pragma once
/// Initial weights: drawn by tensor and element, each rank what it keeps, to where it lives. Private to
/// engine/.

#include <cstdint>

#include "engine/state_store.h"
#include "tranche/kernels/workspace.h"

namespace tranche::detail {

/// Draws the weights of all tensors on the device, whose bits they are, in ranges that fit `workspace`, and
/// sets optimizer state to its initial values. Collective over each buffer's group where ranks keep whole
/// parameters but share the optimizer's state (the gather is in progress on return).
void draw_initial_weights(StateStore& store, const Config& config, Device& device,
                          MemoryResource& host_memory, kernels::Workspace workspace);

/// Draws the weights of frozen tensors alone, from a seed that may be another than the configuration's.
/// Collective as above.
void draw_frozen_weights(StateStore& store, const Config& config, std::uint64_t seed, Device& device,
                         MemoryResource& host_memory, kernels::Workspace workspace);

}  // namespace tranche::detail
