#pragma once
/// The host memory that is free for state which is asked for on nvme (tranche.host_state auto).

#include <cstdint>
#include <functional>

#include "tranche/planner/planner.h"

namespace tranche::planner {

/// Replaces auto in the request's configuration by bytes, the same for all of its ranks: what
/// PlanRequest::host_memory leaves beside everything else that a run takes of it, as plans say. A limit that
/// is given is used up, what a control group's limit leaves but for one eighth (at most 4 GiB), and half of
/// what this machine has available. 0 where no limit is known. Does nothing where bytes are given, or nothing
/// is asked for on nvme.
void resolve_host_state(PlanRequest& request);

/// A bound of what resolve_host_state() replaces auto by: the whole limit. 0 where no limit is known.
std::int64_t most_host_state(const HostMemory& memory);

/// The largest of all ranks' numbers; collective.
using MostOfAll = std::function<std::int64_t(std::int64_t)>;
/// The same in a run: collective, each rank plans itself, PlanRequest::rank, so that none waits for another's
/// plans. Throws on the rank whose plan fails once all have finished.
void resolve_host_state(PlanRequest& request, const MostOfAll& most);

}  // namespace tranche::planner
