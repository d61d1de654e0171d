// Streams, events, graphs, memory and copies: their order, and the calls that are refused.
#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "tests/cuda_emulation/cuda_emulation.h"
#include "tests/cuda_emulation/emulation_fixture.h"

namespace cuda_emulation {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Runtime : public Emulation {
 protected:
  void add(cudaStream_t stream, int* value, int what) {
    EXPECT_EQ(launch("add", 1, 1, 0, stream, [=] { *value = *value * 2 + what; }), cudaSuccess);
  }
};

TEST_F(Runtime, DevicesDescribeThemselves) {
  int count = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 4);
  cudaDeviceProp properties;
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 3), cudaSuccess);
  EXPECT_STREQ(properties.name, "emulated GPU");
  EXPECT_EQ(properties.major, 9);
  EXPECT_EQ(properties.multiProcessorCount, 132);
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 4), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(4), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  char bus[2][16];
  EXPECT_EQ(cudaDeviceGetPCIBusId(bus[0], 16, 0), cudaSuccess);
  EXPECT_EQ(cudaDeviceGetPCIBusId(bus[1], 16, 1), cudaSuccess);
  EXPECT_STRNE(bus[0], bus[1]);
  int blocks = 0;
  EXPECT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, bus, 256, 100 * 1024), cudaSuccess);
  EXPECT_EQ(blocks, 2);
}

TEST_F(Runtime, StreamsKeepTheirOrderUnderDelays) {
  set_delay(200);
  int* value = device(std::vector<int>{0});
  int expected = 0;
  for (int i = 0; i < 20; ++i) {
    add(stream_, value, i);
    expected = expected * 2 + i;
  }
  EXPECT_EQ(host(value, 1)[0], expected);
}

TEST_F(Runtime, TheFirstLaunchOfAKernelWaitsForTheDeviceWhereLoadingIsLazy) {
  set_lazy_loading(true);
  cudaStream_t parked = nullptr;
  ASSERT_EQ(cudaStreamCreate(&parked), cudaSuccess);
  const auto park = [&](std::atomic<bool>& open) {
    const auto wait = [](void* gate) {
      while (!*static_cast<std::atomic<bool>*>(gate)) std::this_thread::yield();
    };
    EXPECT_EQ(cudaLaunchHostFunc(parked, wait, &open), cudaSuccess);
  };
  const int kernel = 0, other = 0, loaded = 0;  // a launch identifies a function by its address
  // Returns whether it could be launched; `expected` decides for how long that is waited for.
  const auto launch_while_parked = [&](const void* function, bool expected) {
    std::atomic<bool> open = false;
    std::atomic<bool> launched = false;
    park(open);
    std::thread host([&] {
      EXPECT_EQ(launch("k", function, 1, 1, 0, stream_, [] {}), cudaSuccess);
      launched = true;
    });
    for (int i = 0; i < (expected ? 60'000 : 100) && !launched; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const bool before = launched;
    open = true;
    host.join();
    EXPECT_EQ(cudaStreamSynchronize(parked), cudaSuccess);
    return before;
  };
  EXPECT_FALSE(launch_while_parked(&kernel, false)) << "its first launch loads it";
  EXPECT_TRUE(launch_while_parked(&kernel, true));
  EXPECT_FALSE(launch_while_parked(&other, false));
  // This loads all kernels of a source, like device/cuda/cuda_modules.cpp.
  decltype(&cuFuncLoad) load = nullptr;
  cudaDriverEntryPointQueryResult found{};
  ASSERT_EQ(cudaGetDriverEntryPointByVersion("cuFuncLoad", reinterpret_cast<void**>(&load), 12040,
                                             cudaEnableDefault, &found),
            cudaSuccess);
  ASSERT_NE(load, nullptr);
  EXPECT_EQ(load(nullptr), CUDA_SUCCESS);
  EXPECT_TRUE(launch_while_parked(&loaded, true));
  set_lazy_loading(false);
  EXPECT_EQ(cudaStreamDestroy(parked), cudaSuccess);
}

TEST_F(Runtime, EventsOrderStreams) {
  set_delay(100);
  cudaStream_t other = nullptr;
  ASSERT_EQ(cudaStreamCreate(&other), cudaSuccess);
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess) << "never recorded";
  int* value = device(std::vector<int>{0});
  int expected = 0;
  for (int i = 0; i < 10; ++i) {  // each wait refers to the preceding record, even if the event is recorded
                                  // again
    add(stream_, value, 2 * i);
    EXPECT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
    add(other, value, 2 * i + 1);
    EXPECT_EQ(cudaEventRecord(event, other), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(stream_, event, 0), cudaSuccess);
    expected = (expected * 2 + 2 * i) * 2 + 2 * i + 1;
  }
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(host(value, 1)[0], expected);
  float time = 0;
  EXPECT_EQ(cudaEventElapsedTime(&time, event, event), cudaErrorInvalidResourceHandle)
      << "made without times";
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, stream_), cudaErrorInvalidResourceHandle);
  EXPECT_THAT(last_diagnostic(), HasSubstr("is no live event"));
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(other), cudaErrorInvalidResourceHandle);
}

TEST_F(Runtime, EventsMeasureTime) {
  cudaEvent_t begin = nullptr, end = nullptr;
  ASSERT_EQ(cudaEventCreate(&begin), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&end), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(begin, stream_), cudaSuccess);
  std::atomic<bool> asked = false;
  const auto rest = [](void* seen) {
    while (!*static_cast<std::atomic<bool>*>(seen)) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  EXPECT_EQ(cudaLaunchHostFunc(stream_, rest, &asked), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(end, stream_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(end), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "not being ready is no error";
  asked = true;
  EXPECT_EQ(cudaEventSynchronize(end), cudaSuccess);
  float milliseconds = 0;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
  EXPECT_GE(milliseconds, 5);
  EXPECT_EQ(cudaEventDestroy(begin), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(end), cudaSuccess);
}

TEST_F(Runtime, HostFunctionsMayNotCallCuda) {
  cudaError_t result = cudaSuccess;
  const auto disobey = [](void* data) { *static_cast<cudaError_t*>(data) = cudaDeviceSynchronize(); };
  EXPECT_EQ(cudaLaunchHostFunc(stream_, disobey, &result), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(result, cudaErrorNotPermitted);
  EXPECT_THAT(last_diagnostic(), HasSubstr("cudaDeviceSynchronize was called from a host function"));
}

TEST_F(Runtime, GraphsRunAgain) {
  int* value = device(std::vector<int>{0});
  cudaStream_t other = nullptr;
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaStreamCreate(&other), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  add(stream_, value, 1);
  EXPECT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);  // `other` joins the capture
  add(other, value, 2);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorCapturedEvent);
  EXPECT_EQ(cudaEventRecord(event, other), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event, 0), cudaSuccess);
  add(stream_, value, 3);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(host(value, 1)[0], 0) << "capturing runs nothing";
  std::size_t nodes = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
  EXPECT_EQ(nodes, 3u);
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  reset_counters();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
  EXPECT_EQ(host(value, 1)[0], 11 * 8 + 11);
  EXPECT_EQ(counters().graph_launches, 2);
  EXPECT_EQ(counters().launches, 0);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
}

TEST_F(Runtime, WhatCannotBeCapturedSpoilsTheCapture) {
  cudaEvent_t outside = nullptr;
  ASSERT_EQ(cudaEventCreate(&outside), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(outside, stream_), cudaSuccess);
  void* data = nullptr;
  std::vector<char> pageable(16);
  char* on_device = device<char>(16);
  const std::vector<std::pair<cudaError_t, std::function<cudaError_t()>>> offences = {
      {cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamSynchronize(stream_); }},
      {cudaErrorStreamCaptureUnsupported, [&] { return cudaDeviceSynchronize(); }},
      {cudaErrorStreamCaptureUnsupported, [&] { return cudaMalloc(&data, 16); }},
      {cudaErrorStreamCaptureUnsupported,
       [&] { return cudaMemcpyAsync(on_device, pageable.data(), 16, cudaMemcpyHostToDevice, stream_); }},
      {cudaErrorStreamCaptureIsolation, [&] { return cudaStreamWaitEvent(stream_, outside, 0); }}};
  for (std::size_t i = 0; i < offences.size(); ++i) {
    SCOPED_TRACE(i);
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(offences[i].second(), offences[i].first);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
  }
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&data, 16), cudaSuccess) << "which relaxed captures permit";
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaFree(data), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(outside), cudaSuccess);
}

TEST_F(Runtime, MemoryIsCounted) {
  std::size_t before = 0, after = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  EXPECT_EQ(total, std::size_t{4} << 30);
  EXPECT_LT(before, total) << "a context takes some";
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, 1000), cudaSuccess);
  EXPECT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  EXPECT_EQ(before - after, 1024u);
  void* more = nullptr;
  EXPECT_EQ(cudaMalloc(&more, after + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(more, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  fail_call("cudaMalloc", 2, cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&more, 8), cudaSuccess);
  owned_.push_back(more);
  EXPECT_EQ(cudaMalloc(&more, 8), cudaErrorMemoryAllocation);
  EXPECT_EQ(live_device_memory().allocations, 2);
  EXPECT_EQ(cudaFree(static_cast<char*>(data) + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(data), cudaSuccess);
  EXPECT_EQ(cudaFree(data), cudaErrorInvalidValue);
  EXPECT_THAT(last_diagnostic(), HasSubstr("is not the beginning of a live allocation"));
}

TEST_F(Runtime, CopiesCheckTheirRanges) {
  char* data = device<char>(100);
  char* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&pinned), 50), cudaSuccess);
  const auto copy = [&](void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, stream_);
  };
  EXPECT_EQ(copy(data, pinned, 50, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(copy(data + 60, data, 41, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_THAT(last_diagnostic(),
              AllOf(HasSubstr("destination 41 bytes"), HasSubstr("run 1 bytes beyond the end of its "
                                                                 "allocation of 100 bytes")));
  EXPECT_EQ(copy(data, pinned + 10, 41, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(copy(pinned, data, 8, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_THAT(last_diagnostic(), HasSubstr("is not device memory"));
  EXPECT_EQ(copy(data, pinned, 8, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(copy(data, data, 8, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(pinned, 0, 8, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(data, pinned, 8, cudaMemcpyHostToDevice, nullptr),
            cudaErrorInvalidResourceHandle);
  cudaPointerAttributes attributes;
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, data + 99), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, pinned), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, &attributes), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

TEST_F(Runtime, RowsAreCopiedAndFilled) {
  char* data = device(std::vector<char>(5 * 4, 'a'));
  EXPECT_EQ(cudaMemset2DAsync(data + 1, 5, 'b', 3, 4, stream_), cudaSuccess);
  EXPECT_EQ(cudaMemcpy2DAsync(data, 10, data + 1, 5, 1, 2, cudaMemcpyDeviceToDevice, stream_), cudaSuccess);
  const std::vector<char> got = host(data, 20);
  EXPECT_EQ(std::string(got.begin(), got.end()), "bbbbaabbbabbbbaabbba");
  EXPECT_EQ(cudaMemset2DAsync(data, 6, 'b', 5, 4, stream_), cudaErrorInvalidValue);
}

// Pinned memory is copied when the stream reaches the copy, pageable memory before the call returns.
TEST_F(Runtime, PageableCopiesStopTheHost) {
  int* data = device(std::vector<int>{1});
  int* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&pinned), 4), cudaSuccess);
  std::vector<int> registered(1024, 7);
  ASSERT_EQ(cudaHostRegister(registered.data(), 4096, cudaHostRegisterDefault), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(registered.data(), 4096, cudaHostRegisterDefault),
            cudaErrorHostMemoryAlreadyRegistered);
  reset_counters();
  std::atomic<bool> open{false};
  const auto wait = [](void* gate) {
    while (!*static_cast<std::atomic<bool>*>(gate)) std::this_thread::yield();
  };
  ASSERT_EQ(cudaLaunchHostFunc(stream_, wait, &open), cudaSuccess);
  *pinned = 5;
  EXPECT_EQ(cudaMemcpyAsync(pinned, data, 4, cudaMemcpyDeviceToHost, stream_), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(data, registered.data(), 4, cudaMemcpyHostToDevice, stream_), cudaSuccess);
  EXPECT_EQ(*pinned, 5) << "not yet";
  EXPECT_EQ(counters().host_waits, 0);
  open = true;
  int pageable = 0;
  EXPECT_EQ(cudaMemcpyAsync(&pageable, data, 4, cudaMemcpyDeviceToHost, stream_), cudaSuccess);
  EXPECT_EQ(pageable, 7);
  EXPECT_EQ(*pinned, 1);
  EXPECT_EQ(counters().host_waits, 1);
  EXPECT_EQ(cudaHostUnregister(registered.data()), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(registered.data()), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

TEST_F(Runtime, NewMemoryIsNaN) {
  float* data = device<float>(3);
  for (const float value : host(data, 3)) EXPECT_NE(value, value);
}

TEST_F(Runtime, CallsAreCountedAndMadeToFail) {
  fail_call("cudaStreamQuery", 1, cudaErrorUnknown);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorUnknown);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess);
  EXPECT_EQ(calls("cudaStreamQuery"), 2);
  EXPECT_STREQ(cudaGetErrorName(cudaErrorUnknown), "cudaErrorUnknown");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
}

using RuntimeDeathTest = Runtime;

TEST_F(RuntimeDeathTest, HostCodeMayNotTouchDeviceMemory) {
  if (!protects_device_memory()) GTEST_SKIP() << "TRANCHE_EMULATION_PROTECT=0";
  int* data = device(std::vector<int>{1});
  EXPECT_DEATH(*static_cast<volatile int*>(data) = 2, "host code touched device memory");
  EXPECT_EQ(host(data, 1)[0], 1);
}

TEST_F(RuntimeDeathTest, KernelsThatRunWildAreNamed) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        void* data = nullptr;
        cudaMalloc(&data, 4096);
        launch("wild", 2, 32, 0, stream_, [=] { static_cast<volatile char*>(data)[4096 + threadIdx.x] = 1; });
        cudaStreamSynchronize(stream_);
      },
      "kernel 'wild', block \\(.,0,0\\) of \\(2,1,1\\), thread \\(.*\\) of \\(32,1,1\\): access to ");
}

TEST_F(RuntimeDeathTest, StreamsMayShareQueues) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  for (const char* queues : {"1", "64"}) {
    setenv("TRANCHE_EMULATION_QUEUES", queues, 1);
    EXPECT_EXIT(
        {
          cudaStream_t other = nullptr;
          cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
          std::atomic<bool> open{false};
          const auto wait = [](void* gate) {
            while (!*static_cast<std::atomic<bool>*>(gate)) std::this_thread::yield();
          };
          cudaLaunchHostFunc(stream_, wait, &open);
          const auto nothing = [](void*) {};
          for (int i = 0; i < 20; ++i) cudaLaunchHostFunc(other, nothing, nullptr);
          const int turns = queues[0] == '1' ? 100 : 60'000;
          bool held_up = true;
          for (int i = 0; i < turns && held_up; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            held_up = cudaStreamQuery(other) == cudaErrorNotReady;
          }
          open = true;
          cudaStreamSynchronize(other);
          std::fprintf(stderr, "%s", held_up ? "held up" : "not held up");
          std::_Exit(0);
        },
        ::testing::ExitedWithCode(0), queues[0] == '1' ? "^held up" : "^not held up");
  }
  unsetenv("TRANCHE_EMULATION_QUEUES");
}

}  // namespace
}  // namespace cuda_emulation
