/// Compares the meter with an independent count (profiling_count.h).
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "comm/transport/message_pieces.h"
#include "comm/window_memory.h"
#include "tests/comm/collective_suite.h"
#include "tests/comm/mpi_main.h"
#include "tests/comm/profiling_count.h"
#include "tranche/comm/backends.h"

namespace tranche {
namespace {

std::unique_ptr<Communicator> world_with(NodeCollectives collectives) {
  CommunicatorOptions options;
  options.timeout_seconds = 60;
  options.staging_bytes = test::mpi_staging_bytes;
  options.collectives = collectives;
  return make_mpi_communicator(options);
}

TEST(Traffic, MeterAndProfilingInterfaceAgreeToTheByte) {
  const auto owned = world_with(NodeCollectives::messages);
  Communicator& comm = *owned;
  const std::int64_t n = comm.size();
  const OperationLabel data{"h.3", "backward"}, control{"", "norm", Traffic::control};
  comm.barrier(control).wait();
  ASSERT_GT(test::profiled_collectives(), 0) << "the interposed functions are not the ones the library calls";
  const std::int64_t bytes = test::profiled_bytes_sent(), messages = test::profiled_messages_sent();
  const std::int64_t others = test::profiled_collectives();
  comm.meter().reset();

  constexpr std::int64_t count = 40013;  // several slots of the staging buffer
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
            test::profiled_bytes_sent() - bytes);
  EXPECT_EQ(test::profiled_collectives() - others, 0) << "no data may go through MPI's collectives";
  EXPECT_GT(test::profiled_messages_sent() - messages, 0);
}

/// The size of a control message of a collective in a window.
constexpr std::int64_t control_bytes = 48;

TEST(Traffic, OnlyControlMessagesTravelWhereRanksReadEachOthersMemory) {
  comm::WindowMemory window(Tier::host);
  CommunicatorOptions options;
  options.staging_bytes = test::mpi_staging_bytes;
  options.collectives = NodeCollectives::shared;
  options.window = &window;
  options.memory = &window;
  const auto comm = make_mpi_communicator(options);
  const std::int64_t n = comm->size(), count = 40013;
  Buffer full(window, n * count * 4, Category::gradients, "gradients");
  std::vector<float> shard(static_cast<std::size_t>(count));
  comm->barrier({"", "", Traffic::control}).wait();
  comm->meter().reset();
  const std::int64_t bytes = test::profiled_bytes_sent(), messages = test::profiled_messages_sent();
  comm->reduce_scatter(full.data(), DataType::float32, shard.data(), DataType::float32, count, {}, {}, {})
      .wait();
  // Each peer gets two control messages: the address of the buffer, and that the peer's buffer has been read.
  EXPECT_EQ(test::profiled_messages_sent() - messages, 2 * (n - 1));
  EXPECT_EQ(test::profiled_bytes_sent() - bytes, 2 * (n - 1) * control_bytes);
  // Bytes that are read from peers count as if they had been sent.
  EXPECT_EQ(comm->meter().total(Traffic::data).elements, (n - 1) * count);
  EXPECT_EQ(comm->meter().total(Traffic::data).bytes, (n - 1) * count * 4);
}

TEST(Traffic, OneSumOfANodeTravelsToEveryRankElsewhere) {
  if (test::world().size() != 5) return;
  comm::WindowMemory window(Tier::host);
  CommunicatorOptions options;
  options.staging_bytes = test::mpi_staging_bytes;
  options.collectives = NodeCollectives::shared;
  options.local_size = 2;  // nodes {0, 1}, {2, 3}, {4}
  options.window = &window;
  options.memory = &window;
  const auto comm = make_mpi_communicator(options);
  const std::int64_t rank = comm->rank(), count = 997;
  Buffer full(window, 5 * count * 2, Category::communication, "gradients");
  Buffer shard(window, count * 4, Category::communication, "shard");
  comm->barrier({"", "", Traffic::control}).wait();
  std::int64_t before = test::profiled_bytes_sent();
  comm->reduce_scatter(full.data(), DataType::bfloat16, shard.data(), DataType::float32, count, {2, false, 0},
                       {}, {})
      .wait();
  // Each of two ranks on a node reduces for the rank with its number on other nodes. Rank 4 is the first on
  // its node and sends its data to all four. Two control messages are sent to the other rank of the node.
  const std::int64_t neighbours = rank == 4 ? 0 : 1;
  const std::int64_t data = rank == 4 ? 4 * count * 2 : (rank % 2 == 0 ? 2 : 1) * count * 4;
  EXPECT_EQ(test::profiled_bytes_sent() - before, data + neighbours * 2 * control_bytes) << rank;
  before = test::profiled_bytes_sent();
  comm->all_gather(shard.data(), full.data(), 499, DataType::bfloat16, 0, {}, {}).wait();
  // A shard is sent once to each other node. Each neighbour gets a third control message, because it also
  // reads the shards that arrive from other nodes.
  EXPECT_EQ(test::profiled_bytes_sent() - before, 2 * 499 * 2 + neighbours * 3 * control_bytes) << rank;
}

TEST(Traffic, WhatGoesToAnotherNodeIsCutInPieces) {
  CommunicatorOptions options;
  options.staging_bytes = std::int64_t{8} << 20;
  options.collectives = NodeCollectives::messages;
  options.local_size = 1;
  const auto comm = make_mpi_communicator(options);
  const std::int64_t others = comm->size() - 1;
  // One small message, one of several parts, and one for most of which MPI asks the receiver first.
  for (const std::int64_t count : {std::int64_t{15000}, std::int64_t{90001}, std::int64_t{700001}}) {
    SCOPED_TRACE(count);
    const auto pieces = static_cast<std::int64_t>(comm::message_pieces(count * 4).size());
    std::vector<float> shard(static_cast<std::size_t>(count)),
        full(static_cast<std::size_t>(count * (others + 1)));
    for (std::int64_t i = 0; i < count; ++i) {
      shard[static_cast<std::size_t>(i)] = static_cast<float>(comm->rank() + 10 * i);
    }
    comm->barrier({"", "", Traffic::control}).wait();
    const std::int64_t bytes = test::profiled_bytes_sent(), messages = test::profiled_messages_sent();
    comm->all_gather(shard.data(), full.data(), count, DataType::float32, 0, {}, {}).wait();
    EXPECT_EQ(test::profiled_bytes_sent() - bytes, others * count * 4);
    EXPECT_EQ(test::profiled_messages_sent() - messages, others * pieces);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(full.size()); ++i) {
      wrong += full[static_cast<std::size_t>(i)] != static_cast<float>(i / count + 10 * (i % count)) ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST(Traffic, TheWholeSuiteAgreesToo) {
  const auto owned = world_with(NodeCollectives::messages);
  Communicator& comm = *owned;
  comm.barrier({"", "", Traffic::control}).wait();
  comm.meter().reset();
  const std::int64_t before = test::profiled_bytes_sent();
  test::check_all_gather(comm);
  test::check_all_reduce(comm, test::mpi_staging_bytes);
  test::check_all_to_all(comm);
  test::check_all_to_all_v(comm, test::mpi_staging_bytes);
  test::check_send_recv(comm);
  test::check_many_in_flight(comm, 20);
  EXPECT_EQ(comm.meter().total(Traffic::data).bytes + comm.meter().total(Traffic::control).bytes,
            test::profiled_bytes_sent() - before);
}

}  // namespace
}  // namespace tranche
