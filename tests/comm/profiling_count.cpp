/// Intercepts the library's MPI calls. MPI's profiling interface lets a program define MPI_Isend and call the
/// real function as PMPI_Isend. Every byte that is passed to a sending call is counted.
#include "tests/comm/profiling_count.h"

#include <mpi.h>

#include <array>
#include <atomic>
#include <cstddef>

#include "comm/transport/mpi_transport.h"

namespace {

constexpr int counted_ranks = 64;
std::atomic<std::int64_t> bytes_sent{0}, messages_sent{0}, collectives{0};
std::array<std::atomic<std::int64_t>, counted_ranks> bytes_to{};

void count(int elements, MPI_Datatype type, int peer, int tag) {
  // The number of questions about a peer's current call depends on the duration of the wait.
  if (tag == tranche::comm::signature_tag) return;
  int size = 0;
  PMPI_Type_size(type, &size);
  bytes_sent += static_cast<std::int64_t>(elements) * size;
  if (peer >= 0 && peer < counted_ranks)
    bytes_to[static_cast<std::size_t>(peer)] += static_cast<std::int64_t>(elements) * size;
  ++messages_sent;
}

}  // namespace

extern "C" {

int MPI_Send(const void* data, int n, MPI_Datatype type, int peer, int tag, MPI_Comm comm) {
  count(n, type, peer, tag);
  return PMPI_Send(data, n, type, peer, tag, comm);
}
int MPI_Ssend(const void* data, int n, MPI_Datatype type, int peer, int tag, MPI_Comm comm) {
  count(n, type, peer, tag);
  return PMPI_Ssend(data, n, type, peer, tag, comm);
}
int MPI_Isend(const void* data, int n, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
              MPI_Request* request) {
  count(n, type, peer, tag);
  return PMPI_Isend(data, n, type, peer, tag, comm, request);
}
int MPI_Issend(const void* data, int n, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
               MPI_Request* request) {
  count(n, type, peer, tag);
  return PMPI_Issend(data, n, type, peer, tag, comm, request);
}
int MPI_Sendrecv(const void* data, int n, MPI_Datatype type, int peer, int tag, void* in, int in_n,
                 MPI_Datatype in_type, int from, int in_tag, MPI_Comm comm, MPI_Status* status) {
  count(n, type, peer, tag);
  return PMPI_Sendrecv(data, n, type, peer, tag, in, in_n, in_type, from, in_tag, comm, status);
}
// The count would miss data that MPI's own collectives send, so there must be none.
int MPI_Allreduce(const void* in, void* out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  ++collectives;
  return PMPI_Allreduce(in, out, n, type, op, comm);
}
int MPI_Allgather(const void* in, int n, MPI_Datatype type, void* out, int m, MPI_Datatype out_type,
                  MPI_Comm comm) {
  ++collectives;
  return PMPI_Allgather(in, n, type, out, m, out_type, comm);
}
int MPI_Bcast(void* data, int n, MPI_Datatype type, int root, MPI_Comm comm) {
  ++collectives;
  return PMPI_Bcast(data, n, type, root, comm);
}
int MPI_Put(const void* data, int n, MPI_Datatype type, int peer, MPI_Aint at, int m, MPI_Datatype to,
            MPI_Win window) {
  count(n, type, peer, 0);
  return PMPI_Put(data, n, type, peer, at, m, to, window);
}

}  // extern "C"

namespace tranche::test {

std::int64_t profiled_bytes_sent() {
  return bytes_sent;
}
std::int64_t profiled_bytes_sent_to(int rank) {
  return bytes_to.at(static_cast<std::size_t>(rank));
}
std::int64_t profiled_messages_sent() {
  return messages_sent;
}
std::int64_t profiled_collectives() {
  return collectives;
}

}  // namespace tranche::test
