#include "device/launch_queues.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

namespace tranche {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* variable = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Returns the warnings for a value of the variable, and restores the variable.
class LaunchQueues : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* text = std::getenv(variable)) before_ = text;
  }
  void TearDown() override { before_ ? setenv(variable, before_->c_str(), 1) : unsetenv(variable); }
  static std::string asked(const char* value) {
    value != nullptr ? setenv(variable, value, 1) : unsetenv(variable);
    return detail::ask_for_launch_queues();
  }
  static std::string now() { return std::getenv(variable); }

 private:
  std::optional<std::string> before_;
};

TEST_F(LaunchQueues, AreAskedForWhereNothingIsSaid) {
  EXPECT_EQ(asked(nullptr), "");
  EXPECT_EQ(now(), "32");
  EXPECT_EQ(detail::ask_for_launch_queues(), "") << "what was asked for before is enough";
  EXPECT_EQ(asked(""), "");
  EXPECT_EQ(now(), "32");
}

TEST_F(LaunchQueues, ThatWereLeftOutByTheEnvironmentAreAskedForWithAWarning) {
  for (const char* few : {"1", "8", "31", "0", "-4", "many", "32 or so", "99999999999999999999"}) {
    EXPECT_THAT(
        asked(few),
        AllOf(HasSubstr(std::string("CUDA_DEVICE_MAX_CONNECTIONS was '") + few +
                        "' in the environment and has been set to 32"),
              HasSubstr("a stream that waits for the host would block the work that the host is waiting for"),
              HasSubstr("unset the variable")));
    EXPECT_EQ(now(), "32");
  }
}

TEST_F(LaunchQueues, ThatSufficeStay) {
  EXPECT_EQ(asked("32"), "");
  EXPECT_EQ(now(), "32");
  EXPECT_EQ(asked("64"), "");
  EXPECT_EQ(now(), "64");
}

}  // namespace
}  // namespace tranche
