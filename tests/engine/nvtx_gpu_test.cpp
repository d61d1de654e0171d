// The NVTX ranges of a training step on a GPU, or on the emulation of one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "device/cuda_probe.h"
#include "odd_model.h"
#include "on_ranks.h"
#include "tests/device/cuda_nvtx_log.h"

namespace tranche::test {
namespace {

using testing_support::take_nvtx_log;

TEST(NvtxRangesOfAStep, NamePhasesUnitsCopiesAndKernels) {
  const detail::CudaProbe probe = detail::probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.device = DeviceKind::cuda;
  on_ranks(
      run,
      [&](Engine& engine, Runtime& runtime) {
        for (int step = 0; step < 2; ++step) {
          whole_step(engine, runtime, step);
          engine.step();
        }
      },
      [&](Config&, RuntimeOptions& options) { options.device = DeviceKind::cuda; });
  const std::vector<std::string> log = take_nvtx_log();
  const auto any = [&](const std::string& beginning, const std::string& name) {
    return std::any_of(log.begin(), log.end(), [&](const std::string& line) {
      return line.starts_with(beginning) && line.find(name) != std::string::npos;
    });
  };
  for (const char* phase : {" forward prime", " backward prime", " reduce prime", " step"}) {
    EXPECT_TRUE(any("start ", phase)) << phase;
  }
  for (const char* work :
       {"copy to host", "copy from host", "all_gather of unit", "reduce_scatter of unit", "adam_update"}) {
    EXPECT_TRUE(any("push ", work)) << work;
  }
  const auto count = [&](const std::string& beginning) {
    return std::count_if(log.begin(), log.end(),
                         [&](const std::string& line) { return line.starts_with(beginning); });
  };
  EXPECT_GT(count("push "), 100);
  EXPECT_EQ(count("push "), count("pop"));
  EXPECT_EQ(count("start "), count("end "));
}

}  // namespace
}  // namespace tranche::test
