#pragma once
/// Compares every collective with a brute-force computation, on the communicator of any backend. Failures are
/// thrown as text (std::runtime_error), because they occur on threads and under mpirun.

#include "tranche/comm/communicator.h"
#include "tranche/device/device.h"

namespace tranche::test {

/// The memory of the suite's buffers, and the communicator's ordering guarantee.
struct SuitePlace {
  Device* device = nullptr;  ///< null: on the heap
  /// Operations run in the order of the calls, so that one that waits delays those after it.
  bool in_order = false;
};

void check_all_gather(Communicator& comm, const SuitePlace& place = {});
/// `staging_bytes`: the communicator's staging buffer, around whose size the suite chooses sizes.
void check_reduce_scatter(Communicator& comm, std::int64_t staging_bytes, const SuitePlace& place = {});
void check_all_reduce(Communicator& comm, std::int64_t staging_bytes);
void check_all_to_all(Communicator& comm, const SuitePlace& place = {});
/// `staging_bytes`: as for check_reduce_scatter.
void check_all_to_all_v(Communicator& comm, std::int64_t staging_bytes, const SuitePlace& place = {});
void check_broadcast(Communicator& comm, const SuitePlace& place = {});
void check_send_recv(Communicator& comm, const SuitePlace& place = {});
void check_split(Communicator& comm, const SuitePlace& place = {});
/// Issues many operations at once and waits for them in another order.
void check_many_in_flight(Communicator& comm, int operations, const SuitePlace& place = {});
/// Checks that an operation with a late ready event does not delay later ones.
void check_late_ready(Communicator& comm, const SuitePlace& place = {});
void check_meter(Communicator& comm, const SuitePlace& place = {});
void check_hash(Communicator& comm);
/// Runs all checks above.
void check_everything(Communicator& comm, std::int64_t staging_bytes, const SuitePlace& place = {});

}  // namespace tranche::test
