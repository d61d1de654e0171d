// On emulated GPUs under AddressSanitizer an access one byte beyond a tensor must be found, for every kernel
// and tensor.
#include <gmock/gmock.h>

#include <algorithm>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/core/program_output.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

ProgramOutput bounds(const std::string& arguments, bool plain = true) {
  const std::string own = own_path();
  return output_of(std::string("TRANCHE_PLAIN_DEVICE_MEMORY=") + (plain ? "1" : "0") + " '" +
                   own.substr(0, own.rfind('/')) + "/kernel_bounds' " + arguments);
}

std::vector<std::pair<std::string, int>> listed() {
  const ProgramOutput run = bounds("--list");
  EXPECT_EQ(run.status, 0) << run.text;
  std::vector<std::pair<std::string, int>> kernels;
  std::istringstream lines(run.text);
  std::string name;
  for (int tensors = 0; lines >> name >> tensors;) kernels.emplace_back(name, tensors);
  return kernels;
}

TEST(KernelBounds, AnAccessOneByteBeyondEachTensorOfTwentyDrawnKernelsIsFound) {
  auto kernels = listed();
  ASSERT_GE(kernels.size(), 20u);
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("drawn with seed " + std::to_string(seed));
  std::shuffle(kernels.begin(), kernels.end(), std::mt19937(seed));
  kernels.resize(20);
  for (const auto& [name, tensors] : kernels) {
    ASSERT_GT(tensors, 0) << name;
    for (int tensor = 0; tensor < tensors; ++tensor) {
      const ProgramOutput run = bounds(name + " " + std::to_string(tensor));
      EXPECT_NE(run.status, 0) << name << ", tensor " << tensor;
      // AddressSanitizer calls an access of 16 bytes that begins within the tensor "unknown-crash", and
      // others "use-after-poison".
      EXPECT_THAT(run.text, HasSubstr("ERROR: AddressSanitizer: ")) << name << ", tensor " << tensor;
    }
  }
}

TEST(KernelBounds, InTheGpusOwnRangeNobodyWouldSee) {
  const ProgramOutput run = bounds("add 2", false);
  EXPECT_EQ(run.status, 0) << run.text;
}

TEST(KernelBounds, AnOtherValueOfTheVariableIsRefused) {
  const std::string own = own_path();
  const ProgramOutput run = output_of("TRANCHE_PLAIN_DEVICE_MEMORY=yes '" + own.substr(0, own.rfind('/')) +
                                      "/kernel_bounds' add 2");
  EXPECT_EQ(run.status, 1);
  EXPECT_THAT(run.text,
              HasSubstr("TRANCHE_PLAIN_DEVICE_MEMORY is 'yes': give 1 for an allocation of CUDA for "
                        "every tensor, or 0"));
}

}  // namespace
}  // namespace tranche::test
