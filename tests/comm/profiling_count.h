#pragma once
/// The data that this process handed to MPI's sending calls, counted behind the library's back (PMPI).

#include <cstdint>

namespace tranche::test {

/// Payload bytes of all point-to-point sends and puts so far.
std::int64_t profiled_bytes_sent();
std::int64_t profiled_messages_sent();
/// Those of the bytes that went to one rank of the communicator that they were sent in.
std::int64_t profiled_bytes_sent_to(int rank);
/// Calls of MPI's own collectives that could carry data past the count above.
std::int64_t profiled_collectives();

}  // namespace tranche::test
