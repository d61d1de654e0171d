// Runs the probe as a GPU host does: the program beside this one.
#include <gmock/gmock.h>

#include <chrono>
#include <string>
#include <vector>

#include "device/cuda_probe.h"
#include "tests/core/program_output.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

ProgramOutput probe(const std::string& arguments, const std::string& environment = "") {
  const std::string own = own_path();
  return output_of(environment + " '" + own.substr(0, own.rfind('/')) + "/gpu_probe' " + arguments);
}

class GpuProbe : public ::testing::Test {
 protected:
  void SetUp() override {
    const detail::CudaProbe found = detail::probe_cuda();
    if (found.devices.empty()) GTEST_SKIP() << found.problem;
  }
};

TEST_F(GpuProbe, EachCheckIsOk) {
  const ProgramOutput run = probe("");
  EXPECT_EQ(run.status, 0) << run.text;
  for (const char* name : {"device", "copy", "tensor_core", "product", "graph", "host_wait"}) {
    EXPECT_THAT(run.text, HasSubstr("probe " + std::string(name) + ": ok\n"));
  }
  EXPECT_THAT(run.text, AllOf(HasSubstr(detail::probe_cuda().devices[0].name), Not(HasSubstr("FAILED"))));
}

TEST_F(GpuProbe, TheChecksAskedForRun) {
  const ProgramOutput run = probe("copy graph");
  EXPECT_EQ(run.status, 0) << run.text;
  EXPECT_EQ(run.text, "probe copy: ok\nprobe graph: ok\n");
  EXPECT_EQ(probe("--one-by-one copy graph").text, run.text);
}

TEST_F(GpuProbe, ACheckThatFailsLeavesTheOthers) {
  if (!detail::probe_cuda().emulated) GTEST_SKIP() << "only the emulation can be given so little memory";
  const ProgramOutput run = probe("copy device host_wait", "TRANCHE_EMULATED_MEMORY=60000000");
  EXPECT_EQ(run.status, 1) << run.text;
  EXPECT_THAT(run.text,
              AllOf(HasSubstr("probe copy: ok"), HasSubstr("probe host_wait: ok"),
                    HasSubstr("probe device: FAILED less than 64 MiB of the GPU's memory are free")));
}

TEST_F(GpuProbe, EndsWithItsTime) {
  const auto begin = std::chrono::steady_clock::now();
  const ProgramOutput run = probe("--limit 0.001");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(run.status, 1) << run.text;
  EXPECT_THAT(run.text, HasSubstr("probe product: FAILED no answer within 0.0 seconds\n"));
  EXPECT_THAT(run.text, HasSubstr("probe host_wait: FAILED no answer within 0.0 seconds\n"));
}

TEST_F(GpuProbe, SaysHowLongAStartTakesAndHoldsTheContextUntilItsInputEnds) {
  EXPECT_THAT(probe("--start").text, ::testing::MatchesRegex("start [0-9]+\\.[0-9]+ s\n"));
  const auto begin = std::chrono::steady_clock::now();
  const ProgramOutput held = probe("--hold", "sleep 1 |");
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(900));
  EXPECT_EQ(held.status, 0) << held.text;
  EXPECT_THAT(held.text, HasSubstr("start "));
}

TEST(GpuProbeUsage, IsTold) {
  for (const char* arguments : {"copies", "--limit", "--limit soon", "--limit 0"}) {
    const ProgramOutput run = probe(arguments);
    EXPECT_EQ(run.status, 2) << run.text;
    EXPECT_THAT(
        run.text,
        HasSubstr("usage: gpu_probe [--limit SECONDS] [--one-by-one] [NAME...], NAME one of device copy"));
  }
  EXPECT_THAT(probe("copies").text, HasSubstr("'copies' is no check"));
  EXPECT_THAT(probe("--limit soon").text, HasSubstr("--limit needs a number of seconds"));
}

}  // namespace
}  // namespace tranche::test
