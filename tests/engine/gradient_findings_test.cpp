// Findings about a gradient that is compared with finite differences of a loss given by a formula.

#include "engine/gradient_findings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

const GradientCheckOptions options{.elements = 8};

/// The loss is the sum of (i + 1) * w_i^2 / 2 over a 2 x 3 matrix. Its gradient is (i + 1) * w_i, which
/// `change` turns into the backward's.
template <typename Change>
TensorCheck check_of(Change&& change) {
  const std::vector<float> weights{1, -2, 0.5f, 3, 1.5f, -1};
  std::vector<float> right, given;
  for (std::size_t i = 0; i < weights.size(); ++i) right.push_back(static_cast<float>(i + 1) * weights[i]);
  for (std::size_t i = 0; i < weights.size(); ++i) given.push_back(change(right, i));
  TensorCheck result;
  result.shape = Shape{2, 3};
  const detail::GradientFindings findings(options, /*scale=*/0.25, /*tokens=*/32);
  findings.compare(result, weights, given, [&](std::int64_t index, double step) {
    const auto slope = [&](double from, double to) {
      const auto loss = [&](double weight) { return static_cast<double>(index + 1) * weight * weight / 2; };
      const double at = weights[static_cast<std::size_t>(index)];
      return (loss(at + to) - loss(at + from)) / (to - from);
    };
    return detail::Slopes{slope(-step, step), slope(-step, 0), slope(0, step)};
  });
  return result;
}

TEST(GradientFindings, NothingIsWrongWithTheGradientOfTheFormula) {
  const TensorCheck result = check_of([](const auto& right, std::size_t i) { return right[i]; });
  EXPECT_EQ(result.finding, "");
  EXPECT_EQ(result.checked, 6);
  EXPECT_EQ(result.wrong, 0);
  EXPECT_TRUE(result.told);
}

TEST(GradientFindings, FactorsAreNamed) {
  const auto times = [](double factor) {
    return check_of(
               [factor](const auto& right, std::size_t i) { return static_cast<float>(factor * right[i]); })
        .finding;
  };
  EXPECT_THAT(times(-1), HasSubstr("-1 times what it should be, in all elements: the sign is swapped"));
  EXPECT_THAT(times(4), HasSubstr("the loss's gradient is not multiplied by loss_gradient_scale()"));
  EXPECT_THAT(times(0.25), HasSubstr("loss_gradient_scale() is multiplied in twice"));
  EXPECT_THAT(times(1.0 / 32), HasSubstr("it is the gradient of the mean loss, not of the sum"));
}

TEST(GradientFindings, ATransposedMatrixAMissingTermAndNothingAtAllAreToldApart) {
  const auto transposed = [](const auto& right, std::size_t i) { return right[i % 2 * 3 + i / 2]; };
  EXPECT_EQ(check_of(transposed).finding, "its gradient is transposed");
  const auto one_less = [](const auto& right, std::size_t i) { return i == 4 ? 0 : right[i]; };
  const TensorCheck missing = check_of(one_less);
  EXPECT_EQ(missing.finding, "1 of 6 elements are wrong: a term is missing, or a wrong one is added");
  EXPECT_EQ(missing.worst, 4);
  const auto nothing = [](const auto&, std::size_t) { return 0.0f; };
  EXPECT_THAT(check_of(nothing).finding, HasSubstr("nothing is added to its gradient"));
}

}  // namespace
}  // namespace tranche::test
