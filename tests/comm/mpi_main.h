#pragma once
/// Test programs under mpirun. Every rank runs all cases; a case that fails on one rank fails on all.

#include "tranche/comm/communicator.h"

namespace tranche::test {

/// The communicator of mpirun's ranks, created once in main.
Communicator& world();
/// The communicator's staging buffer size, around which the suite chooses sizes.
inline constexpr std::int64_t mpi_staging_bytes = 64 << 10;

}  // namespace tranche::test
