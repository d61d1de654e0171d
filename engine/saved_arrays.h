#pragma once
/// The program's own arrays, from what each rank gives to what a checkpoint stores. Private to engine/.

#include <string>
#include <vector>

#include "checkpoint/format.h"
#include "tranche/comm/communicator.h"
#include "tranche/engine/saved_state.h"

namespace tranche::detail {

/// Collective. Combines what the ranks give: one record of each array, equal on all ranks. Throws
/// InvalidArgument on all of them, naming rank and array, when it does not fit together. `replicas`: some
/// ranks hold the same state, and may give the same part. `simulated`: there are no peers, and all that is
/// known is what this rank gives.
std::vector<checkpoint::ArrayRecord> agree_on_arrays(Communicator& ranks, const std::vector<SavedArray>& mine,
                                                     bool replicas, bool simulated);

/// This rank's elements of `record` in the memory that it gave.
const void* stored_part(const checkpoint::ArrayRecord& record, const SavedArray& given, int rank);

}  // namespace tranche::detail
