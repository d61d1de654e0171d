#include "tranche/core/shape.h"
#include "tests/core/error_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace tranche {
namespace {

using test::message_of;
using testing::HasSubstr;

constexpr std::int64_t max64 = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t min64 = std::numeric_limits<std::int64_t>::min();

TEST(Shape, ScalarHasOneElement) {
  const Shape scalar;
  EXPECT_EQ(scalar.rank(), 0);
  EXPECT_EQ(scalar.elements(), 1);
  EXPECT_EQ(scalar.to_string(), "[]");
  EXPECT_EQ(scalar, Shape{});
}

TEST(Shape, HoldsItsExtents) {
  const Shape shape{2, 3, 4};
  EXPECT_EQ(shape.rank(), 3);
  EXPECT_EQ(shape.elements(), 24);
  EXPECT_EQ(shape[0], 2);
  EXPECT_EQ(shape[2], 4);
  EXPECT_EQ(shape.to_string(), "[2, 3, 4]");
  EXPECT_THAT(shape.extents(), testing::ElementsAre(2, 3, 4));
  const std::vector<std::int64_t> extents{2, 3, 4};
  EXPECT_EQ(shape, Shape(std::span<const std::int64_t>(extents)));
  EXPECT_NE(shape, (Shape{2, 3, 4, 1}));
  EXPECT_NE(shape, (Shape{4, 3, 2}));
  EXPECT_EQ((Shape{1, 1, 1, 1, 1, 7}).elements(), 7);
}

TEST(Shape, EmptyWhereverTheZeroStands) {
  EXPECT_EQ((Shape{0}).elements(), 0);
  EXPECT_EQ((Shape{5, 0, 3}).elements(), 0);
  EXPECT_EQ((Shape{max64, max64, 0}).elements(), 0);
  EXPECT_EQ((Shape{0, max64, max64}).elements(), 0);
}

TEST(Shape, RefusesWhatCannotBe) {
  EXPECT_THAT(message_of<InvalidArgument>([] {
                Shape{2, -1};
              }),
              HasSubstr("shape [2, -1] has a negative extent"));
  EXPECT_THAT(message_of<InvalidArgument>([] { Shape{1, 1, 1, 1, 1, 1, 1}; }),
              HasSubstr("has 7 dimensions; at most 6 are supported"));
  EXPECT_THAT(message_of<InvalidArgument>([] {
                Shape{max64, 2};
              }),
              HasSubstr("has more than 1152921504606846975 elements"));
  EXPECT_THAT(message_of<InvalidArgument>([] { Shape{std::int64_t{1} << 60}; }), HasSubstr("has more than"));
  EXPECT_EQ((Shape{(std::int64_t{1} << 60) - 1}).elements(), (std::int64_t{1} << 60) - 1);
  const Shape shape{2, 3};
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)shape[2]; }),
              HasSubstr("axis 2 is out of range for shape [2, 3]"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)shape[-1]; }),
              HasSubstr("axis -1 is out of range for shape [2, 3]"));
}

TEST(CheckedArithmetic, AgreesOrThrows) {
  EXPECT_EQ(checked_multiply(-7, 6), -42);
  EXPECT_EQ(checked_multiply(max64, 1), max64);
  EXPECT_EQ(checked_multiply(min64, 1), min64);
  EXPECT_EQ(checked_add(max64 - 1, 1), max64);
  EXPECT_EQ(checked_add(min64, max64), -1);
  EXPECT_EQ(message_of<InvalidArgument>([] { (void)checked_multiply(max64, 2); }),
            "9223372036854775807 * 2 overflows 64-bit integers");
  EXPECT_THAT(message_of<InvalidArgument>([] { (void)checked_multiply(min64, -1); }), HasSubstr("overflows"));
  EXPECT_EQ(message_of<InvalidArgument>([] { (void)checked_add(max64, 1); }),
            "9223372036854775807 + 1 overflows 64-bit integers");
  EXPECT_THAT(message_of<InvalidArgument>([] { (void)checked_add(min64, -1); }), HasSubstr("overflows"));
}

TEST(Narrow, KeepsWhatFitsAndThrowsOtherwise) {
  EXPECT_EQ(narrow<int>(std::int64_t{2147483647}), 2147483647);
  EXPECT_EQ(narrow<std::uint8_t>(255), 255);
  EXPECT_EQ(narrow<std::int8_t>(-128), -128);
  EXPECT_EQ(narrow<std::uint64_t>(max64), static_cast<std::uint64_t>(max64));
  EXPECT_EQ(message_of<InvalidArgument>([] { (void)narrow<int>(std::int64_t{2147483648}); }),
            "integer 2147483648 does not fit the target type");
  EXPECT_THAT(message_of<InvalidArgument>([] { (void)narrow<std::uint8_t>(256); }),
              HasSubstr("integer 256 does not fit"));
  EXPECT_THAT(message_of<InvalidArgument>([] { (void)narrow<std::uint8_t>(-1); }),
              HasSubstr("integer -1 does not fit"));
  // Both conversions preserve the bits but not the sign.
  EXPECT_THAT(message_of<InvalidArgument>([] { (void)narrow<std::uint64_t>(std::int64_t{-1}); }),
              HasSubstr("does not fit"));
  EXPECT_THAT(message_of<InvalidArgument>([] { (void)narrow<std::int64_t>(~std::uint64_t{0}); }),
              HasSubstr("does not fit"));
}

TEST(Rounding, UpToMultiples) {
  EXPECT_EQ(round_up(0, 64), 0);
  EXPECT_EQ(round_up(1, 64), 64);
  EXPECT_EQ(round_up(64, 64), 64);
  EXPECT_EQ(round_up(65, 64), 128);
  EXPECT_EQ(divide_round_up(0, 3), 0);
  EXPECT_EQ(divide_round_up(9, 3), 3);
  EXPECT_EQ(divide_round_up(10, 3), 4);
}

}  // namespace
}  // namespace tranche
