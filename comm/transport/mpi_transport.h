#pragma once
/// Messages over MPI. Private to comm/mpi*.

#include <memory>
#include <string>

#include "comm/transport/transport.h"
#include "comm/window_memory.h"
#include "tranche/comm/mpi.h"

namespace tranche::comm {

/// Tags of messages without data of a call: failures, signatures (call_signature.h), and the common end after
/// a failure.
inline constexpr int failure_tag = 1 << 30, signature_tag = failure_tag + 1, parting_tag = failure_tag + 2;

/// Throws CommunicationError "MPI_Isend: <MPI's text>" unless `code` is MPI_SUCCESS.
void require_mpi(int code, const char* call);

/// Takes over `communicator`, which nobody else uses. Collective (finds out which ranks share a node). All
/// calls, construction and destruction included, come from the thread that may call MPI. `clean_end` (if not
/// null) is set to whether close() ended with all peers in step. `window` (null: none): memory that the ranks
/// of this node read of each other; outlives the transport. `local_size`: as in CommunicatorOptions.
std::unique_ptr<Transport> make_mpi_transport(MPI_Comm communicator, std::shared_ptr<bool> clean_end,
                                              WindowMemory* window, int local_size);

}  // namespace tranche::comm
