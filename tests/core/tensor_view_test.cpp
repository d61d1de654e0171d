#include "tranche/core/tensor_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

namespace tranche {
namespace {

using testing::HasSubstr;

template <typename Function>
std::string message_of(Function&& function) {
  try {
    function();
  } catch (const InvalidArgument& error) {
    return error.message() + " at " + error.position();
  }
  return "nothing was thrown";
}

TEST(TensorView, CountsElementsAndBytes) {
  std::array<float, 6> data{};
  const TensorView view{data.data(), DataType::float32, {2, 3}};
  EXPECT_EQ(view.elements(), 6);
  EXPECT_EQ(view.bytes(), 24);
  EXPECT_EQ(view.as<float>(), data.data());
  const ConstTensorView read_only = view;
  EXPECT_EQ(read_only.as<float>(), data.data());
  EXPECT_EQ(read_only.bytes(), 24);
}

TEST(TensorView, WrongTypeIsRefusedAtTheCaller) {
  std::array<bfloat16, 2> data{};
  const TensorView view{data.data(), DataType::bfloat16, {2}};
  EXPECT_THAT(message_of([&] { (void)view.as<float>(); }),
              HasSubstr("wanted dtype fp32, view holds bf16 at tensor_view_test.cpp:"));
  EXPECT_THAT(message_of([&] { (void)ConstTensorView(view).as<float16>(); }),
              HasSubstr("wanted dtype fp16, view holds bf16 at tensor_view_test.cpp:"));
}

TEST(TensorView, ReshapesWhatHasAsManyElements) {
  std::array<float, 6> data{};
  const TensorView view{data.data(), DataType::float32, {2, 3}};
  EXPECT_EQ(view.reshaped({6}).shape, Shape{6});
  EXPECT_EQ(view.reshaped({1, 3, 2}).data, data.data());
  EXPECT_THAT(message_of([&] { (void)view.reshaped({7}); }),
              HasSubstr("cannot view shape [2, 3] (6 elements) as [7] (7 elements)"));
  EXPECT_THAT(message_of([&] { (void)ConstTensorView(view).reshaped({}); }),
              HasSubstr("cannot view shape [2, 3] (6 elements) as [] (1 elements)"));
}

TEST(TensorView, SlicesByElements) {
  std::array<std::uint16_t, 6> data{};
  const TensorView view{data.data(), DataType::uint16, {2, 3}};
  const TensorView part = view.slice(2, 3);
  EXPECT_EQ(part.as<std::uint16_t>(), data.data() + 2);
  EXPECT_EQ(part.shape, Shape{3});
  EXPECT_EQ(ConstTensorView(view).slice(5, 1).as<std::uint16_t>(), data.data() + 5);
  EXPECT_EQ(view.slice(6, 0).elements(), 0);
  for (const auto& [first, count] : {std::pair{-1, 2}, {0, 7}, {6, 1}, {7, 0}, {2, -1}}) {
    const std::string text = "slice of " + std::to_string(count) + " elements from element " +
                             std::to_string(first) + " does not lie in a view of shape [2, 3] (6 elements)";
    EXPECT_THAT(message_of([&] { (void)view.slice(first, count); }), HasSubstr(text));
    EXPECT_THAT(message_of([&] { (void)ConstTensorView(view).slice(first, count); }), HasSubstr(text));
  }
}

TEST(TensorView, ViewsOfNothingStayNull) {
  const TensorView view{nullptr, DataType::float32, {8}};
  EXPECT_EQ(view.slice(4, 2).data, nullptr);
  EXPECT_EQ(view.reshaped({2, 4}).data, nullptr);
}

}  // namespace
}  // namespace tranche
