// Budgets of a rank on a GPU; ranks exchange data through host memory before they choose a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "device/cuda_probe.h"
#include "tests/core/error_text.h"
#include "tranche/core/error.h"
#include "tranche/engine/runtime.h"

namespace tranche {
namespace {

using detail::CudaProbe;
using detail::probe_cuda;
using test::message_of;
using ::testing::HasSubstr;

TEST(RuntimeBudgetsOnGpus, CountTheMemoryThatRanksMeetThrough) {
  const CudaProbe probe = probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  // A single rank exchanges nothing. Two exchange data through host memory that each allocates before it has
  // a device.
  run_thread_ranks(2, [](int, const CommunicatorFactory& factory) {
    RuntimeOptions options;
    options.device = DeviceKind::cuda;
    options.log_level = LogLevel::off;
    const std::int64_t at_start = Runtime(options, factory).ledger().total(Tier::host);
    ASSERT_GT(at_start, 0);
  });
}

TEST(RuntimeBudgetsOnGpus, AreKeptBesideIt) {
  const CudaProbe probe = probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  run_thread_ranks(2, [](int, const CommunicatorFactory& factory) {
    RuntimeOptions options;
    options.device = DeviceKind::cuda;
    options.log_level = LogLevel::off;
    options.host_memory_limit = std::int64_t{1} << 30;
    const Runtime runtime(options, factory);
    const std::int64_t left = options.host_memory_limit - runtime.ledger().total(Tier::host);
    EXPECT_LT(left, options.host_memory_limit);
    EXPECT_THAT(message_of<OutOfMemory>([&] {
                  const Buffer more(runtime.memory(Tier::host), left + 1, Category::other, "too much");
                }),
                HasSubstr("are left"));
    EXPECT_NO_THROW(Buffer(runtime.memory(Tier::host), 1 << 20, Category::other, "a part of the rest"));
  });
}

TEST(RuntimeBudgetsOnGpus, MayBeTooSmallForMeeting) {
  const CudaProbe probe = probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  run_thread_ranks(2, [](int, const CommunicatorFactory& factory) {
    RuntimeOptions options;
    options.device = DeviceKind::cuda;
    options.log_level = LogLevel::off;
    options.host_memory_limit = 4096;
    EXPECT_THAT(message_of<OutOfMemory>([&] { const Runtime runtime(options, factory); }),
                HasSubstr("but the limit is 4.00 KiB"));
  });
}

// The driver reads the variable when it starts, so the test needs a process of its own.
TEST(RuntimeOnGpusDeathTest, SaysThatItAskedForMoreQueuesThanTheEnvironment) {
  constexpr const char* variable = "CUDA_DEVICE_MAX_CONNECTIONS";
  if (const CudaProbe probe = probe_cuda(); probe.devices.empty()) GTEST_SKIP() << probe.problem;
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  setenv(variable, "1", 1);
  EXPECT_EXIT(
      {
        RuntimeOptions options;
        options.device = DeviceKind::cuda;
        const Runtime runtime(options,
                              [](const CommunicatorOptions& own) { return make_self_communicator(own); });
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0), "CUDA_DEVICE_MAX_CONNECTIONS was '1' in the environment");
  setenv(variable, "32", 1);
}

}  // namespace
}  // namespace tranche
