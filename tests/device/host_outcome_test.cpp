#include "device/cuda/host_outcome.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace tranche::cuda {
namespace {

std::exception_ptr failure(const char* text) {
  return std::make_exception_ptr(std::runtime_error(text));
}

std::string text_of(const std::exception_ptr& error) {
  if (!error) return "none";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

TEST(HostOutcome, AFailureConcernsWhatCameAfterIt) {
  HostOutcome outcome;
  EXPECT_TRUE(outcome.settled(0));
  const auto first = outcome.issue();
  const auto second = outcome.issue();
  const auto third = outcome.issue();
  EXPECT_EQ(first, 1);
  EXPECT_FALSE(outcome.settled(first));
  outcome.ended(first);
  EXPECT_TRUE(outcome.settled(first));
  outcome.fail(second, failure("second"));
  outcome.ended(second);
  outcome.fail(third, failure("third"));
  outcome.ended(third);
  EXPECT_EQ(text_of(outcome.failure_by(first)), "none");
  EXPECT_TRUE(outcome.settled(first));
  EXPECT_EQ(text_of(outcome.failure_by(second)), "second");
  EXPECT_EQ(text_of(outcome.failure_by(third)), "second") << "the first failure stays";
  EXPECT_FALSE(outcome.settled(third));
}

TEST(HostDependencies, StayShortAndKeepFailures) {
  auto a = std::make_shared<HostOutcome>();
  auto b = std::make_shared<HostOutcome>();
  HostDependencies needs;
  for (int i = 0; i < 100; ++i) {
    const auto number = a->issue();
    needs.add(a, number);
    EXPECT_EQ(needs.size(), 1u) << "one entry a stream";
    a->ended(number);
  }
  needs.forget_settled();
  EXPECT_TRUE(needs.empty());
  needs.add(a, 100);
  EXPECT_TRUE(needs.empty()) << "what has ended well is not kept";

  const auto later = b->issue();
  const auto too_late = b->issue();
  HostDependencies other;
  other.add(b, later);
  needs.add(other);
  EXPECT_EQ(needs.size(), 1u);
  b->ended(later);
  b->fail(too_late, failure("after the point"));
  EXPECT_EQ(text_of(needs.failure()), "none") << "the failure came after what is depended on";
  needs.add(b, too_late);
  EXPECT_EQ(text_of(needs.failure()), "after the point");
  needs.forget_settled();
  EXPECT_EQ(needs.size(), 1u) << "a failure is never forgotten";
}

}  // namespace
}  // namespace tranche::cuda
