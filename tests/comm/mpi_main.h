#pragma once
/// Test programs under mpirun: every rank runs all cases; each case fails on all ranks when it fails on one.

#include "tranche/comm/communicator.h"

namespace tranche::test {

/// The world of mpirun, made once in main.
Communicator& world();
/// Sends the communicator's staging buffer size along, for the sizes that the suite tries.
inline constexpr std::int64_t mpi_staging_bytes = 64 << 10;

}  // namespace tranche::test
