// Ranks are threads with a GPU each. Compares every collective with its definition, and tests failures of
// ranks.
#include <nccl.h>

#include <chrono>
#include <functional>
#include <thread>

#include "tests/cuda_emulation/emulation_fixture.h"
#include "tranche/core/dtype.h"

namespace cuda_emulation {
namespace {

using ::testing::HasSubstr;

struct Rank {
  int rank = 0, count = 0;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;

  template <class T>
  T* device(const std::vector<T>& values) const {
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, values.size() * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
    return static_cast<T*>(data);
  }
  template <class T>
  std::vector<T> take(T* data, std::size_t count_of) const {
    std::vector<T> values(count_of);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(values.data(), data, count_of * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(cudaFree(data), cudaSuccess);
    return values;
  }
  /// Waits for the end of a nonblocking call.
  ncclResult_t settle() const {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
      EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return state;
  }
};

void on_ranks(int count, bool blocking, const std::function<void(Rank&)>& body) {
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank) {
    threads.emplace_back([=, &body] {
      Rank me{rank, count};
      ASSERT_EQ(cudaSetDevice(rank), cudaSuccess);
      ASSERT_EQ(cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking), cudaSuccess);
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = blocking;
      const ncclResult_t made = ncclCommInitRankConfig(&me.comm, count, id, rank, &config);
      EXPECT_EQ(made, blocking ? ncclSuccess : ncclInProgress);
      if (!blocking) {
        EXPECT_EQ(me.settle(), ncclSuccess);
      }
      body(me);
      if (me.comm != nullptr) {
        EXPECT_EQ(ncclCommDestroy(me.comm), ncclSuccess);
      }
      EXPECT_EQ(cudaStreamDestroy(me.stream), cudaSuccess);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class Nccl : public Emulation {
 protected:
  void TearDown() override {
    heal_ranks();
    Emulation::TearDown();
  }
};

TEST_F(Nccl, CollectivesFollowTheirDefinitions) {
  for (const int count : {1, 2, 3, 4}) {
    on_ranks(count, true, [](Rank& me) {
      const auto n = static_cast<std::size_t>(me.count);
      const float own = static_cast<float>(me.rank + 1);
      const float sum = static_cast<float>(me.count * (me.count + 1) / 2);
      // Both operations run in place, as in the library: a rank's own part is at its final position.
      std::vector<float> pieces(3 * n, -1);
      for (std::size_t i = 0; i < 3; ++i) pieces[3 * static_cast<std::size_t>(me.rank) + i] = own;
      float* gathered = me.device(pieces);
      EXPECT_EQ(ncclAllGather(gathered + 3 * me.rank, gathered, 3, ncclFloat32, me.comm, me.stream),
                ncclSuccess);
      float* scattered = me.device(std::vector<float>(3 * n, own));
      EXPECT_EQ(
          ncclReduceScatter(scattered, scattered + 3 * me.rank, 3, ncclFloat32, ncclSum, me.comm, me.stream),
          ncclSuccess);
      auto* reduced = me.device(std::vector<tranche::bfloat16>(5, tranche::to_bfloat16(own)));
      EXPECT_EQ(ncclAllReduce(reduced, reduced, 5, ncclBfloat16, ncclSum, me.comm, me.stream), ncclSuccess);
      int* sent = me.device(std::vector<int>(2, me.rank + 10));
      EXPECT_EQ(ncclBroadcast(sent, sent, 2, ncclInt32, me.count - 1, me.comm, me.stream), ncclSuccess);
      double* most = me.device(std::vector<double>(1, own));
      EXPECT_EQ(ncclReduce(most, most, 1, ncclFloat64, ncclMax, 0, me.comm, me.stream), ncclSuccess);

      const auto all = me.take(gathered, 3 * n);
      for (std::size_t i = 0; i < 3 * n; ++i) EXPECT_EQ(all[i], static_cast<float>(i / 3 + 1));
      EXPECT_EQ(me.take(scattered, 3 * n)[3 * static_cast<std::size_t>(me.rank) + 2], sum);
      EXPECT_EQ(tranche::to_float(me.take(reduced, 5)[4]), sum);
      EXPECT_EQ(me.take(sent, 2)[1], me.count + 9);
      EXPECT_EQ(me.take(most, 1)[0], me.rank == 0 ? me.count : own);
    });
  }
}

// Every rank sends to every other in one group, twice without a wait between.
TEST_F(Nccl, GroupsOfMessagesDoNotDeadlock) {
  on_ranks(4, false, [](Rank& me) {
    int* from = me.device(std::vector<int>{me.rank, me.rank + 10, me.rank + 20, me.rank + 30});
    int* to = me.device(std::vector<int>(8, -1));
    for (int round = 0; round < 2; ++round) {
      EXPECT_EQ(ncclGroupStart(), ncclSuccess);
      for (int peer = 0; peer < me.count; ++peer) {
        EXPECT_EQ(ncclSend(from + peer, 1, ncclInt32, peer, me.comm, me.stream), ncclSuccess);
        EXPECT_EQ(ncclRecv(to + 4 * round + peer, 1, ncclInt32, peer, me.comm, me.stream), ncclSuccess);
      }
      EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
      EXPECT_EQ(me.settle(), ncclSuccess);
    }
    const auto got = me.take(to, 8);
    for (int i = 0; i < 8; ++i) EXPECT_EQ(got[static_cast<std::size_t>(i)], i % 4 + 10 * me.rank);
    EXPECT_EQ(cudaFree(from), cudaSuccess);
  });
}

TEST_F(Nccl, GraphsRepeatCollectives) {
  on_ranks(2, true, [](Rank& me) {
    float* value = me.device(std::vector<float>{1});
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(me.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    ASSERT_EQ(ncclAllReduce(value, value, 1, ncclFloat32, ncclSum, me.comm, me.stream), ncclSuccess);
    ASSERT_EQ(cudaStreamEndCapture(me.stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(cudaGraphLaunch(executable, me.stream), cudaSuccess);
    EXPECT_EQ(me.take(value, 1)[0], 8.0f);
    EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  });
}

TEST_F(Nccl, NonblockingCallsMustBeAskedForTheirEnd) {
  on_ranks(2, false, [](Rank& me) {
    float* value = me.device(std::vector<float>{1});
    EXPECT_EQ(ncclAllReduce(value, value, 1, ncclFloat32, ncclSum, me.comm, me.stream), ncclInProgress);
    EXPECT_EQ(ncclAllReduce(value, value, 1, ncclFloat32, ncclSum, me.comm, me.stream), ncclInvalidUsage);
    EXPECT_THAT(ncclGetLastError(me.comm),
                HasSubstr("the last call of this nonblocking communicator has not ended"));
    EXPECT_EQ(me.settle(), ncclSuccess);
    EXPECT_EQ(me.take(value, 1)[0], 2.0f);
    EXPECT_EQ(ncclCommFinalize(me.comm), ncclInProgress);
    EXPECT_EQ(me.settle(), ncclSuccess);
  });
}

TEST_F(Nccl, ASilentRankEndsByAbort) {
  silence_rank(1);
  on_ranks(2, false, [](Rank& me) {
    float* value = me.device(std::vector<float>{1});
    EXPECT_EQ(ncclAllReduce(value, value, 1, ncclFloat32, ncclSum, me.comm, me.stream), ncclInProgress);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(cudaStreamQuery(me.stream), cudaErrorNotReady);
    EXPECT_EQ(ncclCommAbort(me.comm), ncclSuccess);
    EXPECT_EQ(ncclCommAbort(me.comm), ncclInvalidArgument) << "it is gone";
    me.comm = nullptr;
    EXPECT_EQ(me.take(value, 1)[0], 1.0f) << "nothing was reduced";
  });
}

TEST_F(Nccl, FailuresAreTold) {
  fail_rank(1, ncclRemoteError);
  on_ranks(1, true, [](Rank& me) {
    ncclResult_t state = ncclSuccess;
    EXPECT_EQ(ncclCommGetAsyncError(me.comm, &state), ncclSuccess);
    EXPECT_EQ(state, ncclSuccess) << "rank 1's failure is not rank 0's";
    float on_host = 0;
    EXPECT_EQ(ncclBroadcast(&on_host, &on_host, 1, ncclFloat32, 0, me.comm, me.stream), ncclInvalidArgument);
    EXPECT_THAT(ncclGetLastError(me.comm), HasSubstr("lies in no live device allocation"));
    EXPECT_EQ(ncclSend(&on_host, 1, ncclFloat32, 1, me.comm, me.stream), ncclInvalidArgument);
    EXPECT_THAT(ncclGetLastError(me.comm), HasSubstr("ncclSend: peer or root 1 of 1"));
    fail_call("ncclAllReduce", 1, ncclSystemError);
    EXPECT_EQ(ncclAllReduce(nullptr, nullptr, 1, ncclFloat32, ncclSum, me.comm, me.stream), ncclSystemError);
  });
  heal_ranks();
  on_ranks(2, true, [](Rank& me) {  // the counts differ
    float* value = me.device(std::vector<float>(2, 1));
    const std::size_t count = me.rank == 0 ? 1 : 2;
    EXPECT_EQ(ncclAllReduce(value, value, count, ncclFloat32, ncclSum, me.comm, me.stream), ncclSuccess);
    me.take(value, 1);
    ncclResult_t state = ncclSuccess;
    EXPECT_EQ(ncclCommGetAsyncError(me.comm, &state), ncclSuccess);
    EXPECT_EQ(state, ncclInvalidUsage);
  });
  EXPECT_THAT(last_diagnostic(),
              HasSubstr("NCCL ranks do not agree: rank 0 calls ncclAllReduce of 1 elements"));
}

TEST_F(Nccl, TwoRanksOnOneGpuAreRefused) {
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  ncclComm_t comms[2];
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  EXPECT_EQ(ncclCommInitRankConfig(&comms[0], 2, id, 0, &config), ncclInProgress);
  ncclResult_t state = ncclSuccess;
  EXPECT_EQ(ncclCommGetAsyncError(comms[0], &state), ncclSuccess);
  EXPECT_EQ(state, ncclInProgress) << "the other has not come";
  EXPECT_EQ(ncclCommInitRankConfig(&comms[1], 2, id, 1, &config), ncclInProgress);
  for (ncclComm_t comm : comms) {
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    EXPECT_EQ(state, ncclInvalidUsage);
    EXPECT_THAT(ncclGetLastError(comm),
                HasSubstr("Duplicate GPU detected: rank 0 and rank 1 both on CUDA device 0"));
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  }
}

}  // namespace
}  // namespace cuda_emulation
