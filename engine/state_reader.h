#pragma once
/// Reads a rank's part of a checkpoint into its state. Private to engine/.

#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "engine/state_store.h"
#include "engine/tensor_match.h"

namespace tranche::detail {

/// Reads this rank's part of these sections of all units. State in this process's memory is read directly, as
/// one pipeline; other state is read through host memory, one buffer after another. Other sections, and
/// tensors that the match leaves out, do not change; padding is zeroed. Throws CheckpointError for damage,
/// after which some state may already be replaced.
void read_sections(StateStore& store, checkpoint::Reader& reader, const TensorMatch& match,
                   const std::vector<checkpoint::SectionRecord>& sections, Device& device,
                   MemoryResource& host_memory);

}  // namespace tranche::detail
