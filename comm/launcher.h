#pragma once
/// The rank that a launcher wrote into the environment, for use before there is a communicator.

namespace tranche::detail {

/// The rank that the launcher (mpirun, or Slurm with PMI) gave this process; -1 when it is unknown.
int rank_by_launcher();

}  // namespace tranche::detail
