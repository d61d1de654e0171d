/// The choice of a transport for ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/device_communicator.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using testing::HasSubstr;

std::vector<comm::DevicePlace> places(std::initializer_list<comm::DevicePlace> list) {
  return list;
}
std::string refusal(comm::DeviceTransport wanted, const std::vector<comm::DevicePlace>& ranks,
                    bool has_nccl = true) {
  try {
    return std::string("chosen: ") + std::string(name_of(comm::choose_transport(wanted, ranks, has_nccl)));
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_status(), ExitStatus::configuration);
    return error.message();
  }
}

TEST(DeviceTransports, AutoTakesTheQuickestThatServesAllRanks) {
  const comm::DevicePlace a0{1, "a", "a", "0000:3b:00.0", 0}, a1{2, "a", "a", "0000:af:00.0", 1},
      b0{3, "b", "b", "0000:3b:00.0", 0}, thread_of_a0{1, "a", "a", "0000:3b:00.0", 0},
      neighbour_of_a0{4, "a", "a", "0000:3b:00.0", 0}, cpu{5, "a", "a", "", 0};
  const auto choice = [](const std::vector<comm::DevicePlace>& ranks, bool has_nccl = true) {
    return comm::choose_transport(comm::DeviceTransport::automatic, ranks, has_nccl);
  };
  EXPECT_EQ(choice({a0}), comm::DeviceTransport::shared);
  EXPECT_EQ(choice({a0, thread_of_a0}), comm::DeviceTransport::shared);
  EXPECT_EQ(choice({a0, a1, b0}), comm::DeviceTransport::nccl) << "equal bus ids of two nodes are two GPUs";
  EXPECT_EQ(choice({a0, a1, b0}, false), comm::DeviceTransport::staged);
  EXPECT_EQ(choice({a0, a1, neighbour_of_a0}), comm::DeviceTransport::staged);
  EXPECT_EQ(choice({a0, cpu}), comm::DeviceTransport::staged);
}

TEST(DeviceTransports, WhatCannotServeIsRefusedWithTheRanksNamed) {
  const comm::DevicePlace a0{1, "a", "a", "0000:3b:00.0", 0}, a1{2, "a", "a", "0000:af:00.0", 1},
      again{3, "a", "a", "0000:3b:00.0", 0}, thread_of_a1{1, "a", "a", "0000:af:00.0", 1},
      cpu{1, "a", "a", "", 0};
  EXPECT_EQ(refusal(comm::DeviceTransport::nccl, {a1, a0, again}),
            "tranche.device_transport: nccl was asked for, but ranks 1 and 2 share GPU 0 (0000:3b:00.0) of "
            "node a, and "
            "NCCL takes one rank a GPU; start one rank a GPU, or choose auto or staged (for a smoke test "
            "only, give "
            "every process an NCCL_HOSTID of its own)");
  comm::DevicePlace named = again;
  named.nccl_node = "NCCL_HOSTID 7";
  EXPECT_EQ(refusal(comm::DeviceTransport::nccl, {a1, a0, named}), "chosen: nccl");
  EXPECT_EQ(refusal(comm::DeviceTransport::automatic, {a1, a0, named}), "chosen: staged");
  EXPECT_EQ(refusal(comm::DeviceTransport::nccl, {a0}, false),
            "NCCL is not part of this build; configure with -DTRANCHE_NCCL=ON");
  EXPECT_EQ(refusal(comm::DeviceTransport::nccl, {a0, cpu}),
            "tranche.device_transport: nccl was asked for, but the device of rank 1 is no GPU; choose device "
            "cuda, or "
            "auto");
  EXPECT_EQ(refusal(comm::DeviceTransport::shared, {a0, a1}),
            "tranche.device_transport: shared was asked for, but ranks 0 and 1 are not threads of one "
            "process; choose "
            "auto or staged");
  EXPECT_EQ(refusal(comm::DeviceTransport::shared, {a0, thread_of_a1}),
            "tranche.device_transport: shared was asked for, but ranks 0 and 1 are on devices 0 and 1; "
            "choose auto or "
            "nccl");
  EXPECT_EQ(refusal(comm::DeviceTransport::automatic, {a0, thread_of_a1}, true), "chosen: nccl");
}

TEST(DeviceTransports, MoreThreadRanksThanAGpuHasQueuesForAreRefused) {
  const comm::DevicePlace thread_of_a0{1, "a", "a", "0000:3b:00.0", 0},
      thread_of_a1{1, "a", "a", "0000:af:00.0", 1}, process_on_a0{2, "a", "a", "0000:3b:00.0", 0},
      cpu{1, "a", "a", "", 0};
  std::vector<comm::DevicePlace> ranks(4, thread_of_a0);
  EXPECT_EQ(refusal(comm::DeviceTransport::automatic, ranks), "chosen: shared");
  ranks.insert(ranks.begin(), {thread_of_a1, process_on_a0});
  EXPECT_EQ(refusal(comm::DeviceTransport::automatic, ranks), "chosen: staged") << "others do not count";
  ranks.push_back(thread_of_a0);
  for (const comm::DeviceTransport wanted :
       {comm::DeviceTransport::automatic, comm::DeviceTransport::staged}) {
    EXPECT_EQ(
        refusal(wanted, ranks),
        "5 ranks of one process (rank 2 is the first) share GPU 0000:3b:00.0 of node a, and its 32 launch "
        "queues suffice for 4: with more, a rank that waits may hold up the one it waits for; start fewer "
        "ranks, or each as a process of its own");
  }
  EXPECT_EQ(refusal(comm::DeviceTransport::automatic, std::vector<comm::DevicePlace>(9, cpu)),
            "chosen: shared");
  for (int process = 0; process < 7; ++process)
    ranks[static_cast<std::size_t>(process)].process = 10u + process;
  EXPECT_EQ(refusal(comm::DeviceTransport::automatic, ranks), "chosen: staged");
}

TEST(DeviceTransports, HaveNames) {
  for (const char* name : {"auto", "nccl", "staged", "shared"})
    EXPECT_EQ(name_of(comm::device_transport_of(name)), name);
  EXPECT_EQ(refusal(comm::DeviceTransport::automatic, places({{}})), "chosen: shared");
  try {
    comm::device_transport_of("gdr");
    FAIL();
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.message(), "'gdr' is not one of auto, nccl, staged, shared");
  }
}

TEST(DeviceTransports, OptionsThatDoNotFitAreRefused) {
  const auto device = make_device({});
  const auto message = [&](const comm::DeviceCommunicatorOptions& options,
                           std::unique_ptr<Communicator> host) {
    try {
      comm::make_device_communicator(*device, std::move(host), options);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("not refused");
  };
  comm::DeviceCommunicatorOptions options;
  options.library_collectives = true;
  EXPECT_EQ(message(options, make_self_communicator()),
            "tranche.collectives: nccl needs tranche.device_transport nccl, but these ranks use shared; "
            "leave the key "
            "out, or start one rank a GPU");
  run_thread_ranks(2, [&](int, const CommunicatorFactory& factory) {
    const auto own = make_device({});
    comm::DeviceCommunicatorOptions inline_options;
    inline_options.inline_progress = true;
    try {
      comm::make_device_communicator(*own, factory(CommunicatorOptions{}), inline_options);
      ADD_FAILURE();
    } catch (const ConfigurationError& error) {
      EXPECT_THAT(error.message(),
                  HasSubstr("tranche.progress: inline moves communication only inside calls"));
    }
    comm::DeviceCommunicatorOptions small;
    small.transport = comm::DeviceTransport::staged;
    small.staging_bytes = 4000;
    try {
      comm::make_device_communicator(*own, make_self_communicator(), small);
    } catch (const Error&) {
      ADD_FAILURE() << "one rank stages nothing";
    }
  });
}

}  // namespace
}  // namespace tranche
