#pragma once
/// Every collective against brute force, for whichever backend hands over the communicator. Failures are
/// thrown as text (std::runtime_error), since they happen on threads and under mpirun alike.

#include "tranche/comm/communicator.h"
#include "tranche/device/device.h"

namespace tranche::test {

/// The tier of the suite's buffers, and the communicator's guarantee of order.
struct SuitePlace {
  Device* device = nullptr;  ///< null: on the heap
  /// Operations run in the order of the calls: one that waits holds up those behind it.
  bool in_order = false;
};

void check_all_gather(Communicator& comm, const SuitePlace& place = {});
/// `staging_bytes`: what the communicator was made with, so that sizes around it are tried.
void check_reduce_scatter(Communicator& comm, std::int64_t staging_bytes, const SuitePlace& place = {});
void check_all_reduce(Communicator& comm, std::int64_t staging_bytes);
void check_all_to_all(Communicator& comm, const SuitePlace& place = {});
/// `staging_bytes`: as of check_reduce_scatter.
void check_all_to_all_v(Communicator& comm, std::int64_t staging_bytes, const SuitePlace& place = {});
void check_broadcast(Communicator& comm, const SuitePlace& place = {});
void check_send_recv(Communicator& comm, const SuitePlace& place = {});
void check_split(Communicator& comm, const SuitePlace& place = {});
/// Many operations in flight at once, waited for in another order.
void check_many_in_flight(Communicator& comm, int operations, const SuitePlace& place = {});
/// An operation whose ready event is late does not hold up later ones.
void check_late_ready(Communicator& comm, const SuitePlace& place = {});
void check_meter(Communicator& comm, const SuitePlace& place = {});
void check_hash(Communicator& comm);
/// All of the above.
void check_everything(Communicator& comm, std::int64_t staging_bytes, const SuitePlace& place = {});

}  // namespace tranche::test
