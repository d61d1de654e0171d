#include "tranche/core/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "tests/core/exact_draw.h"

namespace tranche {
namespace {

SquareSum sum_of_squares(const std::vector<float>& numbers) {
  SquareSum sum;
  for (const float x : numbers) sum.add(double{x} * double{x});
  return sum;
}

TEST(ExactSum, IsTheRationalSumRoundedOnce) {
  for (const ExactCase& drawn : square_sums) {
    const double sum = sum_of_squares(drawn_floats(drawn)).value();
    EXPECT_EQ(std::bit_cast<std::uint64_t>(sum), drawn.bits)
        << drawn.kind << ' ' << drawn.count << ": " << sum;
  }
  for (const ExactCase& drawn : number_sums) {
    LossSum sum;
    for (const double x : drawn_doubles(drawn)) sum.add(x);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(sum.value()), drawn.bits) << drawn.kind << ' ' << drawn.count;
  }
}

TEST(ExactSum, NeitherOrderNorPartsChangeALimb) {
  std::mt19937 engine(7);
  for (const ExactCase& drawn : number_sums) {
    std::vector<double> numbers = drawn_doubles(drawn);
    LossSum whole;
    for (const double x : numbers) whole.add(x);
    whole.normalize();
    std::shuffle(numbers.begin(), numbers.end(), engine);
    LossSum parts[3];
    for (std::size_t i = 0; i < numbers.size(); ++i) parts[engine() % 3].add(numbers[i]);
    EXPECT_EQ((parts[2] += parts[0]) += parts[1], whole) << drawn.kind << ' ' << drawn.count;
  }
}

TEST(ExactSum, EndsOfTheRange) {
  LossSum sum;
  EXPECT_EQ(sum.value(), 0);
  const double largest = std::numeric_limits<double>::max(), smallest = 0x1p-1074;
  sum.add(largest);
  sum.add(smallest);
  EXPECT_EQ(sum.value(), largest);
  sum.add(-largest);
  EXPECT_EQ(sum.value(), smallest);
  sum.add(-smallest);
  sum.add(-smallest);
  EXPECT_EQ(sum.value(), -smallest);
  sum.add(smallest);
  sum.normalize();
  EXPECT_EQ(sum, LossSum());
}

TEST(ExactSum, TiesGoToTheEvenNumberUnlessABitBelowDecides) {
  const double half = 0x1p-53;
  for (const double below : {-0x1p-1000, 0.0, 0x1p-1000}) {
    LossSum even, odd;
    even.add(1.0);
    even.add(half);
    even.add(below);
    EXPECT_EQ(even.value(), below > 0 ? 1.0 + 2 * half : 1.0) << below;
    odd.add(1.0 + 2 * half);
    odd.add(half);
    odd.add(below);
    EXPECT_EQ(odd.value(), below < 0 ? 1.0 + 2 * half : 1.0 + 4 * half) << below;
  }
}

}  // namespace
}  // namespace tranche
