#include "kernels/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tranche::kernels {
namespace {

template <typename F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const InvalidArgument& error) {
    return error.message();
  }
  return "nothing was thrown";
}

TEST(KernelChecks, NameTheKernelAndTheOperand) {
  EXPECT_EQ(refusal([] { check_floating("cast", "to", DataType::int32); }),
            "cast: `to` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([] { check_dtype("adam_update", "master", DataType::bfloat16, {DataType::float32}); }),
            "adam_update: `master` has dtype bf16, wanted fp32");
  EXPECT_EQ(refusal([] { check_elements("cast", "to", 7, 8); }), "cast: `to` has 7 elements, wanted 8");
  EXPECT_EQ(refusal([] { check_rank("add_bias", "x", Shape{7}, 2); }),
            "add_bias: `x` has shape [7], wanted 2 dimensions");
  EXPECT_EQ(refusal([] {
              check_rank("add_bias", "bias", Shape{7, 1}, 1);
            }),
            "add_bias: `bias` has shape [7, 1], wanted 1 dimension");
  EXPECT_EQ(refusal([] {
              check_shape("matmul", "c", Shape{2, 3}, Shape{2, 4});
            }),
            "matmul: `c` has shape [2, 3], wanted [2, 4]");
}

TEST(KernelChecks, LetRightArgumentsPass) {
  EXPECT_NO_THROW(check_floating("cast", "to", DataType::float16));
  EXPECT_NO_THROW(check_elements("cast", "to", 0, 0));
  EXPECT_NO_THROW(check_rank("add_bias", "x", Shape{7, 1}, 2));
  EXPECT_NO_THROW(check_shape("matmul", "c", Shape{2, 3}, Shape{2, 3}));
}

}  // namespace
}  // namespace tranche::kernels
