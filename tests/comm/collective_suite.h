#pragma once
/// Every collective against brute force, for whichever backend hands over the communicator. Failures are
/// thrown as text (std::runtime_error), since they happen on threads and under mpirun alike.

#include "tranche/comm/communicator.h"

namespace tranche::test {

void check_all_gather(Communicator& comm);
/// `slab_bytes`: what the communicator was made with, so that sizes around it are tried.
void check_reduce_scatter(Communicator& comm, std::int64_t slab_bytes);
void check_all_reduce(Communicator& comm, std::int64_t slab_bytes);
void check_all_to_all(Communicator& comm);
void check_broadcast(Communicator& comm);
void check_send_recv(Communicator& comm);
void check_split(Communicator& comm);
/// Many operations in flight at once, waited for in another order.
void check_many_in_flight(Communicator& comm, int operations);
/// An operation whose ready event is late does not hold up later ones.
void check_late_ready(Communicator& comm);
void check_meter(Communicator& comm);
void check_hash(Communicator& comm);
/// All of the above.
void check_everything(Communicator& comm, std::int64_t slab_bytes);

}  // namespace tranche::test
