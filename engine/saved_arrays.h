#pragma once
/// Combines the program's own arrays from all ranks into a checkpoint's records. Private to engine/.

#include <string>
#include <vector>

#include "checkpoint/format.h"
#include "tranche/comm/communicator.h"
#include "tranche/engine/saved_state.h"

namespace tranche::detail {

/// Collective. Combines the ranks' arrays into one record for each array, equal on all ranks. Throws
/// InvalidArgument on all of them, naming rank and array, when they do not fit together. `replicas`: some
/// ranks hold the same state, and may pass the same part. `simulated`: there are no peers, and only this
/// rank's arrays are known.
std::vector<checkpoint::ArrayRecord> agree_on_arrays(Communicator& ranks, const std::vector<SavedArray>& mine,
                                                     bool replicas, bool simulated);

/// The elements of `record` that this rank stores, in the program's memory.
const void* stored_part(const checkpoint::ArrayRecord& record, const SavedArray& given, int rank);

}  // namespace tranche::detail
