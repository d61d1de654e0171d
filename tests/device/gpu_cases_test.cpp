// Tests the listener of GPU tests on a child process: this program itself, with cases that only a child runs.
#include "tests/device/gpu_cases.h"

#include <gmock/gmock.h>

#include <cstdlib>

#include "device/cuda_probe.h"
#include "tests/core/program_output.h"
#include "tests/device/gpu_cases_fault.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class GpuCases : public ::testing::Test {
 protected:
  void SetUp() override {
    const detail::CudaProbe probe = detail::probe_cuda();
    if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  }
  /// Runs cases of DISABLED_Child in the order of their definition below.
  static ProgramOutput child(const std::string& environment, const std::string& cases) {
    std::string filter;
    for (const char name : cases)
      filter += (filter.empty() ? "" : ":") + std::string("DISABLED_Child.") + name + "*";
    return output_of(environment + " GTEST_FILTER='" + filter + "' timeout 60 '" + own_path() +
                     "' --gtest_also_run_disabled_tests");
  }
};

class DISABLED_Child : public GpuCases {};

TEST_F(DISABLED_Child, APasses) {}
TEST_F(DISABLED_Child, BForgetsAnErrorOfACall) {
  const auto device = make_device({.kind = DeviceKind::cuda});
  EXPECT_ANY_THROW(static_cast<void>(
      device->memory(Tier::device).allocate({std::int64_t{1} << 50, Category::other, "far too much"})));
}
TEST_F(DISABLED_Child, CLosesTheContext) {
  const auto device = make_device({.kind = DeviceKind::cuda});
  lose_cuda_context(device->compute_stream());  // the case makes no call that would report the error
}
TEST_F(DISABLED_Child, DHangs) {
  const auto device = make_device({.kind = DeviceKind::cuda});
  device->compute_stream().wait(Event(std::make_shared<HostEvent>()));
  device->compute_stream().synchronize();
}
TEST_F(DISABLED_Child, EFollows) {}

TEST_F(GpuCases, AnErrorThatStaysEndsTheProgramNamingTheCase) {
  const ProgramOutput run = child("", "ABCE");
  EXPECT_EQ(run.status, status_after_fault) << run.text;
  EXPECT_THAT(
      run.text,
      AllOf(HasSubstr("A case left a CUDA error that stays: DISABLED_Child.CLosesTheContext: cudaError"),
            HasSubstr("[  FAILED  ] DISABLED_Child.CLosesTheContext ("),
            HasSubstr("[       OK ] DISABLED_Child.BForgetsAnErrorOfACall"), Not(HasSubstr("EFollows"))));
}

TEST_F(GpuCases, ACaseThatHangsEndsTheProgramNamingIt) {
  const ProgramOutput run = child("TRANCHE_TEST_CASE_SECONDS=2", "DE");
  EXPECT_EQ(run.status, status_after_hang) << run.text;
  EXPECT_THAT(run.text,
              AllOf(HasSubstr("A case hangs: DISABLED_Child.DHangs has taken more than 2.0"),
                    HasSubstr("[  FAILED  ] DISABLED_Child.DHangs (2000 ms)"), Not(HasSubstr("EFollows"))));
}

TEST_F(GpuCases, CasesThatPassEndAsEver) {
  const ProgramOutput run = child("TRANCHE_TEST_CASE_SECONDS=60", "ABE");
  EXPECT_EQ(run.status, 0) << run.text;
  EXPECT_THAT(run.text, HasSubstr("[       OK ] DISABLED_Child.EFollows"));
}

TEST_F(GpuCases, ALimitThatIsNoNumberIsRefused) {
  for (const char* limit : {"soon", "0", "-3", "5s"}) {
    const ProgramOutput run = child("TRANCHE_TEST_CASE_SECONDS=" + std::string(limit), "A");
    EXPECT_EQ(run.status, 2) << run.text;
    EXPECT_THAT(run.text, HasSubstr("TRANCHE_TEST_CASE_SECONDS is '" + std::string(limit) +
                                    "': give the seconds that a case may take"));
  }
}

}  // namespace
}  // namespace tranche::test
