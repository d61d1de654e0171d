// Failures of the runtime and the driver, and drivers that lack functions, produced by the emulation.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "device/cuda/cuda_modules.h"
#include "device/cuda/cuda_state.h"
#include "tests/cuda_emulation/control.h"
#include "tests/device/cuda_support.h"
#include "tranche/core/trace.h"

namespace tranche {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing_support::message_of;

// The position of a function among those that the device requests from the driver at its creation.
constexpr int first_of_mapping = 2;
constexpr int waiting_for_words = 10;

class CudaFailures : public testing_support::CudaTest {
 protected:
  void SetUp() override {
    cuda_emulation::recover();
    cuda_emulation::forget_failures();
    CudaTest::SetUp();
  }
  void TearDown() override {
    cuda_emulation::forget_failures();
    cuda_emulation::recover();  // before the device frees its resources, which would fail as well
    device_.reset();
  }
  void make_without(int function) {
    device_.reset();
    cuda_emulation::fail_call("cudaGetDriverEntryPointByVersion", function, cudaErrorSymbolNotFound);
    device_ = make_device({DeviceKind::cuda, 0, 1});
  }
  std::int64_t free_bytes() { return device().memory_info().free; }
};

/// A source of kernels, like each source in kernels/cuda/ (kernels/cuda/launch.h).
const int kernel_of_this_source = 0;
const cuda::KernelSource this_source(&kernel_of_this_source);

// Loading a kernel may wait for the whole GPU. The stream of one rank may wait for another rank's thread,
// which creates its device later.
TEST_F(CudaFailures, ADeviceMadeBesideOneThatWaitsLoadsNothing) {
  device_.reset();
  cuda_emulation::set_lazy_loading(true);
  cuda_emulation::reset_counters();
  device_ = make_device({DeviceKind::cuda, 0, 1});
  EXPECT_GT(cuda_emulation::calls("cuFuncLoad"), 0);
  const auto gate = std::make_shared<HostEvent>();
  compute().wait(Event(gate));
  const Event behind = compute().record();
  auto second = std::async(std::launch::async, [] { return make_device({DeviceKind::cuda, 1, 1}); });
  EXPECT_EQ(second.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_FALSE(behind.query());
  gate->complete();
  behind.wait();
  second.wait();
  cuda_emulation::set_lazy_loading(false);
}

std::string refusal_to_start() {
  return message_of<ConfigurationError>([] { make_device({DeviceKind::cuda, 0, 1}); });
}

TEST_F(CudaFailures, NoDriverAndNoGpuAreConfiguration) {
  cuda_emulation::set_driver_version(0);
  EXPECT_THAT(refusal_to_start(),
              AllOf(HasSubstr("no CUDA driver was found"), HasSubstr("choose device cpu")));
  cuda_emulation::set_driver_version(CUDART_VERSION);
  cuda_emulation::fail_call("cudaGetDeviceCount", 1, cudaErrorNoDevice);
  EXPECT_THAT(refusal_to_start(), HasSubstr("no GPU was found; choose"));
  setenv("CUDA_VISIBLE_DEVICES", "7", 1);
  cuda_emulation::fail_call("cudaGetDeviceCount", 1, cudaErrorNoDevice);
  EXPECT_THAT(refusal_to_start(), HasSubstr("no GPU was found (CUDA_VISIBLE_DEVICES is '7')"));
  unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST_F(CudaFailures, AnOlderDriverIsSaidWithBothVersions) {
  cuda_emulation::set_driver_version(12040);
  EXPECT_THAT(refusal_to_start(),
              AllOf(HasSubstr("the driver serves CUDA 12.4, and this build needs CUDA 13."),
                    HasSubstr("install a newer driver")));
  EXPECT_EQ(detail::probe_cuda().driver_version, 12040);
  cuda_emulation::set_driver_version(CUDART_VERSION);
  EXPECT_EQ(detail::probe_cuda().problem, "");
}

TEST_F(CudaFailures, WhatLiesOutsideOfTheProgramComesWithAdvice) {
  for (const auto& [error, advice] :
       {std::pair{cudaErrorSystemDriverMismatch, "reboot after an update of the driver"},
        std::pair{cudaErrorSystemNotReady, "nvidia-fabricmanager"},
        std::pair{cudaErrorCompatNotSupportedOnDevice, "remove its folder"},
        std::pair{cudaErrorMpsConnectionFailed, "CUDA_MPS_PIPE_DIRECTORY"},
        std::pair{cudaErrorUnknown, "/dev/nvidia-uvm"}}) {
    cuda_emulation::fail_call("cudaGetDeviceCount", 1, error);
    EXPECT_THAT(refusal_to_start(), HasSubstr(advice));
  }
  // Exclusive use shows when the context is created.
  cuda_emulation::fail_call("cudaSetDevice", 1, cudaErrorDevicesUnavailable);
  EXPECT_THAT(message_of<DeviceError>([] {
                make_device({DeviceKind::cuda, 0, 1});
              }),
              HasSubstr("another process uses the GPU, and its compute mode admits only one"));
  // A GPU for which the kernels were not compiled shows at the first launch.
  EXPECT_THAT(
      message_of<DeviceError>([] { cuda::check(cudaErrorNoKernelImageForDevice, "cudaLaunchKernelExC"); }),
      AllOf(HasSubstr("cudaLaunchKernelExC failed"), HasSubstr("CMAKE_CUDA_ARCHITECTURES")));
}

TEST_F(CudaFailures, CallsAreNamed) {
  Buffer a = memory(1 << 20);
  char host[16] = {};
  try {
    cuda_emulation::fail_call("cudaMemcpyAsync", 1, cudaErrorInvalidValue);
    device().copy_to_host(compute(), host, a.data(), 16);
    FAIL() << "the call failed";
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.exit_status(), ExitStatus::other);
    EXPECT_THAT(error.message(),
                AllOf(HasSubstr("cudaMemcpyAsync failed (copy to host of 16 B on stream 'compute')"),
                      HasSubstr("cudaErrorInvalidValue, invalid argument")));
  }
  compute().synchronize();
  EXPECT_EQ(host[0], 0) << "nothing is delivered of a copy that failed";
  cuda_emulation::fail_call("cudaMemcpyAsync", 1, cudaErrorInvalidValue);
  EXPECT_THAT(message_of<DeviceError>([&] { device().copy_from_host(compute(), a.data(), host, 16); }),
              HasSubstr("copy from host of 16 B"));
  cuda_emulation::fail_call("cudaMemsetAsync", 1, cudaErrorInvalidValue);
  EXPECT_THAT(message_of<DeviceError>([&] { device().fill_bytes(compute(), a.data(), 0, 16); }),
              HasSubstr("cudaMemsetAsync failed (stream 'compute')"));
  cuda_emulation::fail_call("cudaEventRecord", 1, cudaErrorInvalidValue);
  EXPECT_THAT(message_of<DeviceError>([&] { compute().record(); }), HasSubstr("cudaEventRecord failed"));
  cuda_emulation::fail_call("cudaLaunchHostFunc", 1, cudaErrorInvalidValue);
  auto stream = device().create_stream("io");
  EXPECT_THAT(message_of<DeviceError>([&] { stream->enqueue("write", [] {}); }),
              HasSubstr("cudaLaunchHostFunc failed ('write' on stream 'io')"));
  cuda_emulation::fail_call("cuStreamWaitValue32", 1, CUDA_ERROR_INVALID_VALUE);
  auto other = device().create_stream("other");
  EXPECT_THAT(message_of<DeviceError>([&] { other->enqueue("read", [] {}); }),
              HasSubstr("cuStreamWaitValue32 failed on stream 'other' with the driver's error 1"));
  cuda_emulation::fail_call("cudaStreamCreateWithPriority", 1, cudaErrorMemoryAllocation);
  EXPECT_THAT(message_of<OutOfMemory>([&] { device().create_stream("more"); }),
              AllOf(HasSubstr("cudaStreamCreateWithPriority failed"), HasSubstr("cudaErrorMemoryAllocation"),
                    HasSubstr("use a smaller micro-batch")));
}

TEST_F(CudaFailures, WaitsSayWhatWasWaitedForAndWhatToDo) {
  auto stream = device().create_stream("gather");
  const Event event = stream->record();
  const auto synchronize = [&] { stream->synchronize(); };
  cuda_emulation::fail_call("cudaEventSynchronize", 1, cudaErrorIllegalAddress);
  EXPECT_THAT(message_of<DeviceError>(synchronize),
              AllOf(HasSubstr("cudaEventSynchronize failed (stream 'gather'): cudaErrorIllegalAddress"),
                    HasSubstr("work issued before has failed"), HasSubstr("CUDA_LAUNCH_BLOCKING=1"),
                    Not(HasSubstr("rank"))));
  cuda_emulation::fail_call("cudaEventRecord", 1, cudaErrorUnknown);
  EXPECT_THAT(message_of<DeviceError>(synchronize), HasSubstr("cudaEventRecord failed (stream 'gather')"));
  {
    const auto of_another_rank = make_device({DeviceKind::cuda, 0, 1});
    cuda_emulation::fail_call("cudaEventSynchronize", 1, cudaErrorIllegalAddress);
    EXPECT_THAT(message_of<DeviceError>(synchronize),
                AllOf(HasSubstr("nor can any of the 2 ranks that are threads of it"),
                      HasSubstr("may be another rank's than the one that met the error")));
    cuda_emulation::fail_call("cudaEventSynchronize", 1, cudaErrorInvalidValue);
    EXPECT_THAT(message_of<DeviceError>(synchronize), Not(HasSubstr("rank"))) << "the GPU is well";
  }
  auto gate = std::make_shared<HostEvent>();
  stream->wait(Event(gate));
  const Event later = stream->record();
  cuda_emulation::fail_call("cudaEventSynchronize", 1, cudaErrorIllegalAddress);
  EXPECT_THAT(message_of<DeviceError>([&] { later.wait(); }), HasSubstr("an event of stream 'gather'"));
  gate->complete();
  later.wait();
}

// A real failure: work on the device accesses forbidden memory, and every later call fails.
TEST_F(CudaFailures, ABrokenDeviceSurfacesAtTheNextWaitAndGoesQuietly) {
  auto stream = device().create_stream("compute 2");
  auto gate = std::make_shared<HostEvent>();
  Buffer a = memory(4096);
  void* gone = a.data();
  stream->wait(Event(gate));
  device().fill_bytes(*stream, gone, 1, 4096);
  const Event event = stream->record();
  a.reset();
  device().release_unused();  // a caller must not do this while work uses the memory
  gate->complete();
  EXPECT_THAT(message_of<DeviceError>([&] { stream->synchronize(); }),
              AllOf(HasSubstr("stream 'compute 2'"), HasSubstr("work issued before has failed")));
  EXPECT_TRUE(event.query()) << "failed counts as passed";
  EXPECT_THAT(message_of<DeviceError>([&] { event.wait(); }), HasSubstr("an event of stream 'compute 2'"));
  EXPECT_THAT(message_of<DeviceError>([&] { compute().record(); }), HasSubstr("failed"));
  stream.reset();  // neither throws nor hangs
}

TEST_F(CudaFailures, MemoryThatTheDriverRefuses) {
  const std::int64_t free = free_bytes();
  cuda_emulation::fail_call("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_THAT(message_of<OutOfMemory>([&] { memory(1 << 20); }),
              AllOf(HasSubstr("'test' (other) asks for 1.00 MiB (1048576 B) of device memory"),
                    HasSubstr("are free"), HasSubstr("this rank holds 0 B")));
  cuda_emulation::fail_call("cuMemSetAccess", 1, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_THAT(message_of<OutOfMemory>([&] { memory(1 << 20); }), HasSubstr("the driver refused"));
  cuda_emulation::fail_call("cuMemMap", 1, CUDA_ERROR_UNKNOWN);
  EXPECT_THAT(message_of<DeviceError>([&] { memory(1 << 20); }),
              HasSubstr("cuMemMap failed with the driver's error 999"));
  EXPECT_EQ(free_bytes(), free) << "nothing is left behind";
  cuda_emulation::fail_call("cuMemCreate", 1, CUDA_ERROR_NOT_SUPPORTED);
  Buffer a = memory(1 << 20);  // some systems refuse shareable memory; then plain memory is used
  device().fill_bytes(compute(), a.data(), 3, 1 << 20);
  EXPECT_EQ(read(a.data(), 1)[0], 3);
}

TEST_F(CudaFailures, PinningThatIsRefused) {
  cuda_emulation::fail_call("cudaHostRegister", 1, cudaErrorMemoryAllocation);
  EXPECT_THAT(message_of<OutOfMemory>([&] { memory(1 << 20, Tier::host); }),
              AllOf(HasSubstr("of host memory"), HasSubstr("could not be had or pinned"),
                    HasSubstr("cudaHostRegister failed"), HasSubstr("cudaErrorMemoryAllocation")));
  cuda_emulation::fail_call("cudaHostRegister", 1, cudaErrorNotSupported);
  EXPECT_THAT(message_of<DeviceError>([&] { memory(1 << 20, Tier::host); }), HasSubstr("pinning 1048576 B"));
  EXPECT_EQ(device().memory_info().pinned, 0);
  // Without the slab each request gets a mapping of its own.
  cuda_emulation::fail_call("cudaHostRegister", 1, cudaErrorMemoryAllocation);
  Buffer small = memory(100, Tier::host);
  EXPECT_EQ(device().memory_info().pinned, sysconf(_SC_PAGESIZE));
}

TEST_F(CudaFailures, WithoutMappingMemoryIsAllocatedPieceByPiece) {
  make_without(first_of_mapping);
  const std::int64_t before = cuda_emulation::calls("cudaMalloc");
  {
    Buffer a = memory(1000);
    Buffer b = memory(0);
    EXPECT_EQ(cuda_emulation::calls("cudaMalloc"), before + 2);
    EXPECT_NE(a.data(), b.data());
    EXPECT_EQ(device().memory_info().mapped, 1024 + 256);
    device().fill_bytes(compute(), a.data(), 5, 1000);
    EXPECT_EQ(read(a.data(), 1000), std::vector<unsigned char>(1000, 5));
    EXPECT_THAT(message_of<OutOfMemory>([&] { memory(std::int64_t{1} << 50); }),
                AllOf(HasSubstr("which cudaMalloc refused"), HasSubstr("this rank holds 1.25 KiB")));
  }
  EXPECT_EQ(device().memory_info().mapped, 0);
}

TEST_F(CudaFailures, WithoutWaitingForWordsHostWorkRunsInTheCallback) {
  make_without(waiting_for_words);
  const std::int64_t before = cuda_emulation::calls("cuStreamWaitValue32");
  std::vector<int> order;
  auto gate = std::make_shared<HostEvent>();
  compute().wait(Event(gate));
  compute().enqueue("first", [&] { order.push_back(1); });
  compute().enqueue("second", [&] { order.push_back(2); });
  const Event event = compute().record();
  EXPECT_FALSE(event.query());
  gate->complete();
  event.wait();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  EXPECT_EQ(cuda_emulation::calls("cuStreamWaitValue32"), before);
  auto stream = device().create_stream("io");
  stream->enqueue("bad", [] { throw CommunicationError("disk is gone"); });
  compute().wait(stream->record());
  EXPECT_THAT(message_of<CommunicationError>([&] { stream->synchronize(); }), HasSubstr("disk is gone"));
  EXPECT_THAT(message_of<CommunicationError>([&] { compute().synchronize(); }), HasSubstr("disk is gone"));
  device().create_stream("stuck")->wait(
      Event(std::make_shared<HostEvent>()));  // the wait gives up after a limit
}

TEST_F(CudaFailures, CapturesThatFailAreSaid) {
  Buffer a = memory(64);
  const auto fill = [&] { device().fill_bytes(compute(), a.data(), 1, 64); };
  auto replay = device().create_replay("step");
  replay->run(compute(), fill);
  cuda_emulation::fail_call("cudaGraphInstantiate", 1, cudaErrorMemoryAllocation);
  replay->run(compute(), fill);
  EXPECT_THAT(replay->problem(),
              AllOf(HasSubstr("'step' is issued anew each time"), HasSubstr("cudaGraphInstantiate")));
  auto spoiled = device().create_replay("spoiled");
  for (int run = 0; run < 3; ++run) {
    spoiled->run(compute(), [&] {
      fill();
      if (run == 1) (void)cudaDeviceSynchronize();
    });
  }
  EXPECT_THAT(spoiled->problem(), HasSubstr("cudaStreamEndCapture"));
  EXPECT_EQ(device().counters().replays, 0);
  EXPECT_EQ(read(a.data(), 64), std::vector<unsigned char>(64, 1));
}

// Earlier events may be queried during a capture (an allocation queries whether memory is free).
TEST_F(CudaFailures, LookingAtEventsDoesNotSpoilACapture) {
  Buffer a = memory(64);
  auto other = device().create_stream("other");
  auto gate = std::make_shared<HostEvent>();
  other->wait(Event(gate));
  const Event pending = other->record();
  auto replay = device().create_replay("step");
  for (int run = 0; run < 3; ++run) {
    replay->run(compute(), [&] {
      EXPECT_FALSE(pending.query());
      EXPECT_FALSE(pending.wait_for(0.001));
      device().fill_bytes(compute(), a.data(), 2, 64);
    });
  }
  gate->complete();
  EXPECT_EQ(replay->problem(), "");
  EXPECT_EQ(device().counters().replays, 2);
  EXPECT_EQ(read(a.data(), 64), std::vector<unsigned char>(64, 2));
}

// During a capture another stream may be waited for, and its trace written.
TEST_F(CudaFailures, WaitingForATracedStreamDoesNotSpoilACapture) {
  TraceRecorder trace(0);
  Buffer a = memory(64), b = memory(64);
  auto other = device().create_stream("other");
  other->set_trace(&trace);
  auto replay = device().create_replay("step");
  for (int run = 0; run < 3; ++run) {
    device().fill_bytes(*other, b.data(), 1, 64);
    replay->run(compute(), [&] {
      other->synchronize();
      device().fill_bytes(compute(), a.data(), 3, 64);
    });
  }
  other->set_trace(nullptr);
  EXPECT_EQ(replay->problem(), "");
  EXPECT_EQ(device().counters().replays, 2);
  EXPECT_EQ(read(a.data(), 64), std::vector<unsigned char>(64, 3));
}

// A stream with LaunchBound's number of operations in its queue waits for earlier ones. This may happen at
// any point of a replay's life.
TEST_F(CudaFailures, TheBoundOfAQueueDoesNotSpoilACapture) {
  Buffer a = memory(64);
  for (int capture = 0; capture < 1000; ++capture) {
    for (int i = 0; i < capture % 3; ++i) device().fill_bytes(compute(), a.data(), 3, 64);
    auto replay = device().create_replay("step");
    for (int run = 0; run < 2; ++run) {
      replay->run(compute(), [&] { device().fill_bytes(compute(), a.data(), 4, 64); });
    }
    ASSERT_EQ(replay->problem(), "") << "capture " << capture;
    ASSERT_EQ(device().counters().replays, capture + 1);
  }
}

TEST_F(CudaFailures, WaitsLeaveTheCoreToOthers) {
  auto stream = device().create_stream("slow");
  const cuda_emulation::Counters before = cuda_emulation::counters();
  stream->enqueue("work", [&] {  // ends when the host waits for it
    while (cuda_emulation::counters().host_waits == before.host_waits) std::this_thread::yield();
  });
  const Event event = stream->record();
  event.wait();
  stream->synchronize();
  const std::int64_t of_device = device().counters().host_waits;
  stream.reset();
  const cuda_emulation::Counters after = cuda_emulation::counters();
  EXPECT_GE(after.host_waits - before.host_waits, 3) << "the event, the stream, and the stream's end";
  EXPECT_EQ(after.spinning_waits, before.spinning_waits);
  EXPECT_EQ(device().counters().host_waits, of_device);
}

// The queue of a real GPU holds about a thousand operations; then the driver blocks the issuing thread.
TEST_F(CudaFailures, NoStreamIsIssuedToFurtherThanItsQueueReaches) {
  constexpr int operations = 3000;
  Buffer a = memory(64);
  auto stream = device().create_stream("behind");
  auto parked = device().create_stream("parked");
  cuda_emulation::reset_counters();
  auto gate = std::make_shared<HostEvent>();
  parked->wait(Event(gate));
  stream->wait(parked->record());
  std::atomic<int> issued{0};
  std::thread issuing([&] {
    for (; issued < operations; ++issued) device().fill_bytes(*stream, a.data(), 1, 64);
  });
  // The gate opens only when issuing has stopped, which is what the test checks.
  for (int seen = -1, turns = 0; seen != issued || (issued <= 100 && turns < 300); ++turns) {
    seen = issued;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  EXPECT_LT(issued, 600);
  EXPECT_GT(issued, 100) << "what a stream is given in a step does not come to that";
  const std::int64_t waits = device().counters().host_waits;
  gate->complete();
  issuing.join();
  stream->synchronize();
  EXPECT_EQ(issued, operations);
  EXPECT_LT(cuda_emulation::counters().most_pending, 600);
  EXPECT_EQ(device().counters().host_waits, waits + 1) << "synchronize is the one wait";
  // A failed stream reports its failure at the operation, without a wait.
  cuda_emulation::fail_call("cudaEventRecord", 1, cudaErrorUnknown);
  for (int i = 0; i < 200; ++i) device().fill_bytes(*stream, a.data(), 2, 64);
  EXPECT_EQ(read(a.data(), 1, *stream)[0], 2);
}

TEST_F(CudaFailures, TimingDoesNotMatter) {
  // Streams wait before each operation for different times; only events determine the order.
  cuda_emulation::set_delay(300);
  auto other = device().create_stream("other");
  Buffer a = memory(256);
  std::vector<unsigned char> back(256);
  for (int i = 0; i < 40; ++i) {
    device().fill_bytes(compute(), a.data(), static_cast<unsigned char>(i), 256);
    other->wait(compute().record());
    device().copy_to_host(*other, back.data(), a.data(), 256);
    if (i % 4 == 0) {
      other->synchronize();
      EXPECT_EQ(back, std::vector<unsigned char>(256, static_cast<unsigned char>(i)));
    }
    compute().wait(other->record());
  }
  cuda_emulation::set_delay(0);
}

}  // namespace
}  // namespace tranche
