#pragma once
/// What a launcher tells in the environment, for use before there is a communicator. Private.

namespace tranche::detail {

/// The rank that the launcher (mpirun, or Slurm with PMI) gave this process; -1 when it is unknown.
int rank_by_launcher();

}  // namespace tranche::detail
