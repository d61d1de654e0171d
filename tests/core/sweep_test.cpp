#include "tests/core/sweep.h"

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

namespace tranche::test {
namespace {

/// Sets a variable of the environment for a scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};

TEST(Sweep, IsAsUsualOrAsTheEnvironmentSays) {
  EXPECT_EQ(sweep({60, 400}).first, 60u);
  EXPECT_EQ(sweep({60, 400}).end(), 460u);
  const Variable seed("TRANCHE_TEST_SEED", "7");
  EXPECT_EQ(sweep({60, 400}).first, 7u);
  EXPECT_EQ(sweep({60, 400}).count, 400u);
  const Variable count("TRANCHE_TEST_COUNT", "1");
  EXPECT_EQ(sweep({60, 400}).count, 1u);
}

TEST(Sweep, AValueThatNoCaseHadFailsTheTest) {
  static AxesMet axes;
  axes.meet("stage", 0);
  axes.meet("stage", 3);
  axes.expect("stage", {0, 3});
  EXPECT_NONFATAL_FAILURE(axes.expect("stage", {0, 2}), "no case had stage 2: take more cases");
  EXPECT_NONFATAL_FAILURE(axes.expect("ranks", {1}), "no case had ranks 1");
  const Variable one("TRANCHE_TEST_COUNT", "1");
  axes.expect("stage", {2});
}

}  // namespace
}  // namespace tranche::test
