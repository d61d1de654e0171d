#include "tranche/data/sampler.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "tests/tools/temporary.h"
#include "tranche/core/error.h"
#include "tranche/kernels/cross_entropy.h"

namespace tranche::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using tools::test::message_of;
using tools::test::TemporaryFolder;

TEST(Permutation, HoldsEveryElementOnce) {
  for (const std::int64_t size : {1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 97, 1000, 4096, 4099}) {
    for (const std::uint64_t seed : {0ull, 1234ull}) {
      const Permutation permutation(size, seed, 3);
      std::set<std::int64_t> seen;
      for (std::int64_t i = 0; i < size; ++i) seen.insert(permutation(i));
      EXPECT_EQ(static_cast<std::int64_t>(seen.size()), size) << "size " << size << ", seed " << seed;
      EXPECT_EQ(*seen.begin(), 0);
      EXPECT_EQ(*seen.rbegin(), size - 1);
    }
  }
}

TEST(Permutation, DiffersByEpochAndSeedAndHasNoOrderLeft) {
  constexpr std::int64_t size = 10007;
  const Permutation a(size, 1, 0), b(size, 1, 1), c(size, 2, 0), again(size, 1, 0);
  std::int64_t same_b = 0, same_c = 0, ascents = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    EXPECT_EQ(a(i), again(i));
    same_b += a(i) == b(i);
    same_c += a(i) == c(i);
    if (i > 0) ascents += a(i) > a(i - 1);
  }
  // Two random permutations are expected to have one place in common (Poisson); 12 or more have probability
  // 1e-9.
  EXPECT_LT(same_b, 12);
  EXPECT_LT(same_c, 12);
  // Half of the steps rise; the deviation of their number is sqrt(size / 12) = 29.
  EXPECT_NEAR(static_cast<double>(ascents), size / 2.0, 6 * 29);
}

TEST(Permutation, RefusesWhatIsOutside) {
  EXPECT_THROW(Permutation(0, 1, 0), InvalidArgument);
  EXPECT_THROW(Permutation((std::int64_t{1} << 56) + 1, 1, 0), InvalidArgument);
  EXPECT_THROW(Permutation(5, 1, 0)(5), InvalidArgument);
  EXPECT_THROW(Permutation(5, 1, 0)(-1), InvalidArgument);
}

TEST(SampleNumbers, AreTheSameSetForEverySplitOfABatch) {
  // 12 samples a step: every way to write 12 = ranks * accumulation * micro-batch.
  for (std::int64_t ranks = 1; ranks <= 12; ++ranks) {
    for (std::int64_t accumulation = 1; accumulation <= 12; ++accumulation) {
      if (12 % (ranks * accumulation) != 0) continue;
      const BatchShape shape{12 / (ranks * accumulation), accumulation, ranks};
      std::vector<std::int64_t> all;
      for (std::int64_t m = 0; m < accumulation; ++m) {
        for (std::int64_t r = 0; r < ranks; ++r) {
          const auto mine = sample_numbers(shape, 25, m, r);
          all.insert(all.end(), mine.begin(), mine.end());
        }
      }
      // In (micro-batch, rank, slot) order they are even ascending.
      std::vector<std::int64_t> wanted(12);
      std::iota(wanted.begin(), wanted.end(), 25);
      EXPECT_EQ(all, wanted) << ranks << " ranks, " << accumulation << " micro-batches";
    }
  }
}

TEST(WindowOfSample, TakesEveryWindowOnceAnEpoch) {
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    std::set<std::int64_t> seen;
    for (std::int64_t i = 0; i < 29; ++i) seen.insert(window_of_sample(epoch * 29 + i, 29, 7));
    EXPECT_EQ(seen.size(), 29u);
  }
}

TEST(Windows, CoverEveryTokenOnceAsTarget) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 30; ++i) text.push_back(static_cast<char>('0' + i));
  const TokenFile file(folder.write("a.txt", text));
  const Windows windows({&file, 5, 22}, 7, "training");  // 22 tokens: three windows of 7 + 1
  ASSERT_EQ(windows.count(), 3);
  std::vector<std::int32_t> inputs, targets;
  read_windows(windows, {0, -1, 2}, 256, inputs, targets);
  ASSERT_EQ(inputs.size(), 21u);
  for (int t = 0; t < 7; ++t) {
    EXPECT_EQ(inputs[static_cast<std::size_t>(t)], '0' + 5 + t);
    EXPECT_EQ(targets[static_cast<std::size_t>(t)], '0' + 6 + t);
    EXPECT_EQ(targets[static_cast<std::size_t>(7 + t)], kernels::ignored_label);
    EXPECT_EQ(inputs[static_cast<std::size_t>(14 + t)], '0' + 19 + t);
    EXPECT_EQ(targets[static_cast<std::size_t>(14 + t)], '0' + 20 + t);
  }
}

TEST(Windows, RefuseDataShorterThanOneSequence) {
  const TemporaryFolder folder;
  const TokenFile file(folder.write("a.txt", "abcdefgh"));
  EXPECT_EQ(Windows({&file, 0, 8}, 7, "training").count(), 1);
  EXPECT_THAT(
      message_of<ConfigurationError>([&] {
        Windows({&file, 0, 8}, 8, "validation");
      }),
      AllOf(HasSubstr("a.txt"), HasSubstr("8 tokens for validation"), HasSubstr("sequence of 8 needs 9")));
}

TEST(EvaluationWindows, AreSpreadEvenlyAndAllWhenFew) {
  EXPECT_EQ(evaluation_windows(5, 0), (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(evaluation_windows(5, 9), (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(evaluation_windows(10, 4), (std::vector<std::int64_t>{0, 2, 5, 7}));
  const auto many = evaluation_windows(std::int64_t{1} << 40, 1000);
  EXPECT_EQ(std::set<std::int64_t>(many.begin(), many.end()).size(), 1000u);
  EXPECT_LT(many.back(), std::int64_t{1} << 40);
}

}  // namespace
}  // namespace tranche::data
