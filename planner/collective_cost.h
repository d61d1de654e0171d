#pragma once
/// Collectives by a machine's tables: collective_seconds() of projection.h, and what it is made of. Private
/// to planner/.

#include <string>

#include "tranche/planner/machine.h"

namespace tranche::planner {

/// The table of the operation that is nearest in ranks, and then in width of elements; null: there is none.
const CollectiveTable* nearest_table(const Machine& machine, const std::string& operation, int ranks,
                                     int element_bytes);

/// Bytes that each node sends to others in a collective, with the arguments of collective_seconds().
double crossing_bytes(const Machine& machine, const std::string& operation, int ranks, int ranks_per_node,
                      int element_bytes, double full_bytes, bool by_library, int groups_on_node,
                      bool by_messages = false);

}  // namespace tranche::planner
