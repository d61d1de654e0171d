#pragma once
/// The host memory that is free for state which is asked for on nvme (tranche.host_state auto).

#include "tranche/planner/planner.h"

namespace tranche::planner {

/// Replaces auto in the request's configuration by bytes, the same for all of its ranks: what
/// PlanRequest::host_memory leaves beside everything else that a run takes of it, as plans say. Of memory
/// that was found on this machine, and not given as a limit, one eighth is left alone, at most 4 GiB. 0 where
/// no limit is known. Does nothing where bytes are given, or nothing is asked for on nvme.
void resolve_host_state(PlanRequest& request);

}  // namespace tranche::planner
