#include "tranche/optim/parameter_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "tranche/core/error.h"

namespace tranche {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(MatchesPattern, MatchesTheWholeName) {
  EXPECT_TRUE(matches_pattern("h.0.attn.weight", "h.0.attn.weight"));
  EXPECT_FALSE(matches_pattern("h.0.attn.weight", "attn"));
  EXPECT_FALSE(matches_pattern("weights", "weight"));
  EXPECT_TRUE(matches_pattern("", ""));
  EXPECT_FALSE(matches_pattern("a", ""));
}

TEST(MatchesPattern, StarsAndQuestionMarks) {
  EXPECT_TRUE(matches_pattern("", "*"));
  EXPECT_TRUE(matches_pattern("h.11.ln_1.bias", "h.*.bias"));
  EXPECT_TRUE(matches_pattern("h.11.ln_1.bias", "*ln_?*"));
  EXPECT_FALSE(matches_pattern("h.11.ln_1.bias", "h.?.ln_1.bias"));
  EXPECT_TRUE(matches_pattern("h.11.ln_1.bias", "h.??.ln_1.bias"));
  EXPECT_FALSE(matches_pattern("abc",
                               "???"
                               "?"));
  EXPECT_TRUE(matches_pattern("abc", "**c**"));
  // The first position at which the star could end is the wrong one.
  EXPECT_TRUE(matches_pattern("aXbaXc", "*aXc"));
  EXPECT_TRUE(matches_pattern("mississippi", "*iss*ip*"));
  EXPECT_FALSE(matches_pattern("mississippi", "*iss*ix*"));
}

TEST(MatchesPattern, IsQuickWherePlainRecursionIsNot) {
  const std::string name(2000, 'a');
  std::string pattern;
  for (int i = 0; i < 200; ++i) pattern += "a*";
  EXPECT_FALSE(matches_pattern(name, pattern + "b"));
}

TEST(ParameterGroups, ByDefaultMatricesDecayAndVectorsDoNot) {
  const ParameterGroups groups;
  for (const int rank : {0, 1}) EXPECT_FALSE(groups.resolve("h.0.ln_1.bias", rank).decay) << rank;
  for (const int rank : {2, 3}) EXPECT_TRUE(groups.resolve("wte.weight", rank).decay) << rank;
  EXPECT_EQ(groups.resolve("wte.weight", 2).learning_rate_factor, 1);
  EXPECT_FALSE(groups.frozen("wte.weight"));
}

TEST(ParameterGroups, LaterRulesWinAndWhatTheyLeaveUnsetStays) {
  const ParameterGroups groups(
      {{"*.bias", std::nullopt, true}, {"h.*", 0.5, std::nullopt}, {"h.3.*", 0.25, false}}, {});
  EXPECT_TRUE(groups.resolve("wte.bias", 1).decay);
  EXPECT_EQ(groups.resolve("wte.bias", 1).learning_rate_factor, 1);
  EXPECT_TRUE(groups.resolve("h.0.bias", 1).decay) << "the second rule says nothing of decay";
  EXPECT_EQ(groups.resolve("h.0.bias", 1).learning_rate_factor, 0.5);
  EXPECT_FALSE(groups.resolve("h.0.scale", 1).decay) << "no rule speaks of it: a vector";
  EXPECT_FALSE(groups.resolve("h.3.weight", 2).decay);
  EXPECT_EQ(groups.resolve("h.3.weight", 2).learning_rate_factor, 0.25);
}

TEST(ParameterGroups, OwnValuesStayUntilALaterRuleHasThem) {
  ParameterGroupRule all{"*", std::nullopt, std::nullopt}, heads = all, quiet = all;
  all.learning_rate = 0.5;
  all.betas = {0.5, 0.25};
  heads.pattern = quiet.pattern = "head.*";
  heads.weight_decay = 0.125;
  heads.epsilon = 0.0625;
  const GroupOptions head = ParameterGroups({all, heads}, {}).resolve("head.bias", 1);
  EXPECT_EQ(head.learning_rate, 0.5);
  EXPECT_EQ(head.betas, (std::array{0.5, 0.25}));
  EXPECT_EQ(head.weight_decay, 0.125);
  EXPECT_TRUE(head.decay) << "who names a weight decay wants it, for a vector too";
  EXPECT_EQ(head.epsilon, 0.0625);
  const GroupOptions other = ParameterGroups({all, heads}, {}).resolve("h.bias", 1);
  EXPECT_FALSE(other.weight_decay || other.epsilon || other.decay);
  quiet.decay = false;
  quiet.learning_rate = 0.75;
  const GroupOptions silenced = ParameterGroups({all, heads, quiet}, {}).resolve("head.weight", 2);
  EXPECT_FALSE(silenced.decay);
  EXPECT_EQ(silenced.learning_rate, 0.75);
}

TEST(ParameterGroups, FrozenNamesAndPatternsThatMatchNothing) {
  const ParameterGroups groups({{"wte.*", 2.0, std::nullopt}, {"wtf.*", 2.0, std::nullopt}},
                               {"h.0.*", "h.9.*", "wtf.*"});
  EXPECT_TRUE(groups.frozen("h.0.attn.weight"));
  EXPECT_FALSE(groups.frozen("h.1.attn.weight"));
  EXPECT_THAT(groups.unmatched({"wte.weight", "h.0.attn.weight"}), ElementsAre("wtf.*", "h.9.*"));
  EXPECT_THAT(ParameterGroups().unmatched({"wte.weight"}), IsEmpty());
  EXPECT_EQ(groups.keys_of("h.9.*"), "tranche.frozen");
  EXPECT_EQ(groups.keys_of("wtf.*"), "tranche.parameter_groups");
  const ParameterGroups decay({{"a", std::nullopt, true}, {"b", std::nullopt, false}}, {});
  EXPECT_EQ(decay.keys_of("a"), "tranche.decay or tranche.parameter_groups");
  EXPECT_EQ(decay.keys_of("b"), "tranche.no_decay or tranche.parameter_groups");
}

TEST(ParameterGroups, RefuseWhatCannotBe) {
  const auto message = [](std::vector<ParameterGroupRule> rules,
                          std::vector<std::string> frozen) -> std::string {
    try {
      ParameterGroups groups(std::move(rules), std::move(frozen));
    } catch (const InvalidArgument& error) {
      return error.message();
    }
    return "nothing was thrown";
  };
  EXPECT_THAT(message({{"", 1.0, true}}, {}), HasSubstr("empty name pattern"));
  EXPECT_THAT(message({{"h.*", -1.0, true}}, {}), HasSubstr("'h.*' has a learning rate factor of -1"));
  EXPECT_THAT(message({{"h.*", std::numeric_limits<double>::infinity(), true}}, {}),
              HasSubstr("factor of inf"));
  ParameterGroupRule rule{"h.*", std::nullopt, false};
  rule.weight_decay = 0.5;
  EXPECT_THAT(message({rule}, {}), HasSubstr("'h.*' has a weight decay of 0.5 and does not decay"));
  rule.weight_decay = -0.5;
  EXPECT_THAT(message({rule}, {}), HasSubstr("'h.*' has a weight decay of -0.5"));
  rule.weight_decay = 0;
  EXPECT_EQ(message({rule}, {}), "nothing was thrown");
  rule.learning_rate = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(message({rule}, {}), HasSubstr("'h.*' has a learning rate of nan"));
  rule.learning_rate.reset();
  rule.epsilon = -1;
  EXPECT_THAT(message({rule}, {}), HasSubstr("'h.*' has an epsilon of -1"));
  rule.epsilon = 1;
  rule.betas = {0.9, 1};
  EXPECT_THAT(message({rule}, {}),
              HasSubstr("'h.*' has betas [0.9, 1]; each must be at least 0 and below 1"));
  EXPECT_THAT(message({}, {"a", ""}), HasSubstr("frozen name pattern is empty"));
}

}  // namespace
}  // namespace tranche
