#pragma once
/// Counts the data that this process passes to MPI's sending calls, through MPI's profiling interface (PMPI).

#include <cstdint>

namespace tranche::test {

/// Payload bytes of all point-to-point sends and puts so far.
std::int64_t profiled_bytes_sent();
std::int64_t profiled_messages_sent();
/// The part of these bytes that went to `rank`, in the communicator of the call.
std::int64_t profiled_bytes_sent_to(int rank);
/// The number of calls of MPI collectives, which could transfer data that is not counted above.
std::int64_t profiled_collectives();

}  // namespace tranche::test
