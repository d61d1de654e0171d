#pragma once
/// Reads a rank's part of a checkpoint into its state. Private to engine/.

#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "engine/state_store.h"
#include "engine/tensor_match.h"

namespace tranche::detail {

/// Reads what this rank keeps of these sections of all units: straight to where it is kept, as one pipeline,
/// where that is memory of this process; else a buffer after the other, through host memory. Sections that
/// are not named and tensors that the match leaves out stay as they are; padding is zeroed. Throws
/// CheckpointError for damage, some state being new then.
void read_sections(StateStore& store, checkpoint::Reader& reader, const TensorMatch& match,
                   const std::vector<checkpoint::SectionRecord>& sections, Device& device,
                   MemoryResource& host_memory);

}  // namespace tranche::detail
