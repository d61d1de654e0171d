#include "tranche/training/sampler.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "tests/tools/temporary.h"
#include "tranche/core/error.h"
#include "tranche/kernels/cross_entropy.h"

namespace tranche::training {
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
  // Two random permutations have one common position on average (Poisson); 12 or more have probability 1e-9.
  EXPECT_LT(same_b, 12);
  EXPECT_LT(same_c, 12);
  // Half of the steps ascend; the standard deviation of their number is sqrt(size / 12) = 29.
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
      // In the order (micro-batch, rank, slot) they are ascending.
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

TEST(Windows, OfSeveralFilesAreNumberedThrough) {
  const TemporaryFolder folder;
  const TokenFile a(folder.write("a.txt", "0123456789")), b(folder.write("b.txt", "abcdefg"));
  const Windows windows({{&a, 0, 10}, {&b, 1, 6}}, 2, "training");
  EXPECT_EQ(windows.count(), 6);  // 4 and 2
  EXPECT_EQ(windows.first(1), 4);
  EXPECT_EQ(windows.first(2), 6);
  EXPECT_EQ(windows.file(3).path(), a.path());
  EXPECT_EQ(windows.start(3), 6);
  EXPECT_EQ(windows.file(4).path(), b.path());
  EXPECT_EQ(windows.start(4), 1);
  EXPECT_EQ(windows.start(5), 3);
  std::vector<std::int32_t> inputs, targets;
  read_windows(windows, {5, 0}, 256, inputs, targets);
  EXPECT_EQ(inputs, (std::vector<std::int32_t>{'d', 'e', '0', '1'}));
  EXPECT_EQ(targets, (std::vector<std::int32_t>{'e', 'f', '1', '2'}));
  EXPECT_THAT(message_of<ConfigurationError>([&] {
                Windows({{&a, 0, 10}, {&b, 5, 2}}, 2, "training");
              }),
              AllOf(HasSubstr("b.txt"), HasSubstr("2 tokens for training")));
}

TEST(Mixture, OfOneSourceIsItsPermutation) {
  const Mixture mixture({{"a", 11, 3.0}}, 5);
  for (std::int64_t sample = 0; sample < 50; ++sample) {
    EXPECT_EQ(mixture.window(sample), window_of_sample(sample, 11, 5));
  }
}

TEST(Mixture, GivesEachSourceItsShareAndAllOfItsWindows) {
  const Mixture mixture({{"a", 70000, 0.75}, {"b", 1000, 0.25}}, 5);
  std::vector<int> seen(71000, 0);
  std::int64_t of_a = 0;
  for (std::int64_t sample = 0; sample < 2 * Mixture::block; ++sample) {
    const std::int64_t window = mixture.window(sample);
    of_a += window < 70000 ? 1 : 0;
    ++seen[static_cast<std::size_t>(window)];
    // It nearly holds in short runs of samples, too.
    if (sample == 3999) {
      EXPECT_NEAR(static_cast<double>(of_a), 3000, 150);
    }
  }
  EXPECT_EQ(of_a, 2 * Mixture::block * 3 / 4);
  const auto [least, most] = std::minmax_element(seen.begin() + 70000, seen.end());
  EXPECT_EQ(*least, 32);
  EXPECT_EQ(*most, 33);  // 32768 samples of 1000 windows
  const auto [least_a, most_a] = std::minmax_element(seen.begin(), seen.begin() + 70000);
  EXPECT_EQ(*least_a, 1);
  EXPECT_EQ(*most_a, 2);
  EXPECT_NE(mixture.window(7), Mixture({{"a", 70000, 0.75}, {"b", 1000, 0.25}}, 6).window(7));
}

TEST(Mixture, RefusesWeightsThatCannotBe) {
  const auto refused = [](double weight) {
    return message_of<ConfigurationError>([&] { Mixture({{"a", 5, 1.0}, {"b", 5, weight}}, 1); });
  };
  EXPECT_EQ(refused(0), "'b' has the weight 0, but weights are above 0");
  EXPECT_EQ(refused(-1), "'b' has the weight -1, but weights are above 0");
  EXPECT_EQ(refused(1e-7), "'b' has the weight 1e-07 of 1.0000001: less than one of 65536 samples");
}

}  // namespace
}  // namespace tranche::training
