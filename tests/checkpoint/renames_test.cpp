#include "checkpoint/renames.h"

#include <gmock/gmock.h>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using test::message_of;
using ::testing::HasSubstr;
using Rules = std::vector<std::pair<std::string, std::string>>;

TEST(Renames, TheFirstRuleThatFitsCountsAndTheStarTakesTheSameText) {
  Renames renames(
      Rules{{"a.b", "c"}, {"model.*.w", "block.*.weight"}, {"model.*", "other"}, {"a.*", "late.*"}});
  EXPECT_EQ(renames.apply("a.b"), "c");
  EXPECT_EQ(renames.apply("model.3.x.w"), "block.3.x.weight");
  EXPECT_EQ(renames.apply("model.3.x"), "other");
  EXPECT_EQ(renames.apply("a.c"), "late.c");
  EXPECT_EQ(renames.apply("model"), "model");
  EXPECT_EQ(renames.apply("b.a.b"), "b.a.b");
  EXPECT_NO_THROW(renames.require_used("x", {}));
  Renames overlapping(Rules{{"aa*aa", "b"}});
  EXPECT_EQ(overlapping.apply("aaa"), "aaa") << "no text may stand on both sides of the star";
}

TEST(Renames, RulesThatCannotBeOrFitNothingAreRefused) {
  const auto refusal = [](const std::string& from, const std::string& to) {
    return message_of<InvalidArgument>([&] { Renames renames(Rules{{from, to}}); });
  };
  EXPECT_THAT(refusal("", "b"), HasSubstr("rename =b: a name is missing"));
  EXPECT_THAT(refusal("a", ""), HasSubstr("rename a=: a name is missing"));
  EXPECT_THAT(refusal("a*b*", "c*"), HasSubstr("rename a*b*=c*: a name has at most one *"));
  EXPECT_THAT(refusal("a", "c*"), HasSubstr("rename a=c*: the * of the new name stands for"));
  Renames unused(Rules{{"weigth", "w"}});
  EXPECT_EQ(unused.apply("weight"), "weight");
  EXPECT_THAT(message_of<CheckpointError>([&] {
                unused.require_used("run1", {"weight", "bias"});
              }),
              HasSubstr("rename weigth=w: run1 has no tensor of this name that no rule before it took; the "
                        "closest match is 'weight'"));
}

}  // namespace
}  // namespace tranche::checkpoint
