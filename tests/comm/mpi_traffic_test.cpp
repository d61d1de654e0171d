/// The meter against an independent count: this program stands between the library and MPI (the profiling
/// interface lets a program define MPI_Isend and reach the real one as PMPI_Isend) and counts every byte that
/// is handed to any sending call.
#include <gtest/gtest.h>
#include <mpi.h>

#include <atomic>

#include "tranche/tests/comm/collective_suite.h"
#include "tranche/tests/comm/mpi_main.h"

namespace {

std::atomic<std::int64_t> bytes_sent{0}, messages_sent{0}, collectives{0};

void count(int elements, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  bytes_sent += static_cast<std::int64_t>(elements) * size;
  ++messages_sent;
}

}  // namespace

extern "C" {

int MPI_Send(const void* data, int n, MPI_Datatype type, int peer, int tag, MPI_Comm comm) {
  count(n, type);
  return PMPI_Send(data, n, type, peer, tag, comm);
}
int MPI_Ssend(const void* data, int n, MPI_Datatype type, int peer, int tag, MPI_Comm comm) {
  count(n, type);
  return PMPI_Ssend(data, n, type, peer, tag, comm);
}
int MPI_Isend(const void* data, int n, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
              MPI_Request* request) {
  count(n, type);
  return PMPI_Isend(data, n, type, peer, tag, comm, request);
}
int MPI_Issend(const void* data, int n, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
               MPI_Request* request) {
  count(n, type);
  return PMPI_Issend(data, n, type, peer, tag, comm, request);
}
int MPI_Sendrecv(const void* data, int n, MPI_Datatype type, int peer, int tag, void* in, int in_n,
                 MPI_Datatype in_type, int from, int in_tag, MPI_Comm comm, MPI_Status* status) {
  count(n, type);
  return PMPI_Sendrecv(data, n, type, peer, tag, in, in_n, in_type, from, in_tag, comm, status);
}
// Data that travelled in a collective of MPI's would escape the count above: there must be none.
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
  count(n, type);
  return PMPI_Put(data, n, type, peer, at, m, to, window);
}

}  // extern "C"

namespace tranche {
namespace {

TEST(Traffic, MeterAndProfilingInterfaceAgreeToTheByte) {
  Communicator& comm = test::world();
  const std::int64_t n = comm.size();
  const OperationLabel data{"h.3", "backward"}, control{"", "norm", Traffic::control};
  comm.barrier(control).wait();
  ASSERT_GT(collectives, 0) << "the interposed functions are not the ones the library calls";
  const std::int64_t bytes = bytes_sent, messages = messages_sent, others = collectives;
  comm.meter().reset();

  constexpr std::int64_t count = 40013;  // several lanes of the slab
  std::vector<bfloat16> full(static_cast<std::size_t>(n * count));
  std::vector<float> shard(static_cast<std::size_t>(count));
  std::vector<Event> events;
  for (int repeat = 0; repeat < 3; ++repeat) {
    events.push_back(comm.reduce_scatter(full.data(), DataType::bfloat16, shard.data(), DataType::float32,
                                         count, {2, repeat > 0, 10007}, {}, data));
    events.back().wait();
    events.push_back(comm.all_gather(full.data() + comm.rank() * count, full.data(), count,
                                     DataType::bfloat16, 5003, {}, data));
    events.back().wait();
  }
  double value = 1;
  comm.all_reduce(&value, 1, DataType::float64, ReduceOperation::sum, control).wait();
  comm.broadcast(shard.data(), 1009, DataType::float32, static_cast<int>(n) - 1, {}, control).wait();
  comm.barrier(control).wait();

  EXPECT_EQ(comm.meter().total(Traffic::data).elements, 6 * (n - 1) * count);
  EXPECT_EQ(comm.meter().total(Traffic::data).bytes + comm.meter().total(Traffic::control).bytes,
            bytes_sent - bytes);
  EXPECT_EQ(collectives - others, 0) << "no data may go through MPI's collectives";
  EXPECT_GT(messages_sent - messages, 0);
}

TEST(Traffic, TheWholeSuiteAgreesToo) {
  Communicator& comm = test::world();
  comm.barrier({"", "", Traffic::control}).wait();
  comm.meter().reset();
  const std::int64_t before = bytes_sent;
  test::check_all_gather(comm);
  test::check_all_reduce(comm, test::mpi_slab_bytes);
  test::check_all_to_all(comm);
  test::check_send_recv(comm);
  test::check_many_in_flight(comm, 20);
  EXPECT_EQ(comm.meter().total(Traffic::data).bytes + comm.meter().total(Traffic::control).bytes,
            bytes_sent - before);
}

}  // namespace
}  // namespace tranche
