#pragma once
/// The parts of collective_seconds() (projection.h), which takes the time of collectives from a machine's
/// tables. Private to planner/.

#include <string>

#include "tranche/planner/machine.h"

namespace tranche::planner {

/// The operation's table that is nearest in the number of ranks, then in the width of elements; null if there
/// is none.
const CollectiveTable* nearest_table(const Machine& machine, const std::string& operation, int ranks,
                                     int element_bytes);

/// Bytes that each node sends to others in a collective, with the arguments of collective_seconds().
double crossing_bytes(const Machine& machine, const std::string& operation, int ranks, int ranks_per_node,
                      int element_bytes, double full_bytes, bool by_library, int groups_on_node,
                      bool by_messages = false);

}  // namespace tranche::planner
