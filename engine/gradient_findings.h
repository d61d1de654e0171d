#pragma once
/// The elements of a tensor whose gradient is compared with differences of the loss, and what the comparison
/// says. Private to engine/.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tranche/engine/check_gradients.h"

namespace tranche::detail {

/// Differences of the loss with one step of a weight.
struct Slopes {
  double central = 0, left = 0, right = 0;
};

/// Compares one tensor after the other. Knows no engine: the caller computes the loss.
class GradientFindings {
 public:
  /// `options` outlives it. `scale` and `tokens`, of a rank's micro-batch: factors that a backward may
  /// forget.
  GradientFindings(const GradientCheckOptions& options, double scale, double tokens)
      : options_(options), scale_(scale), tokens_(tokens) {}

  /// Compares elements of `gradient`, which a backward gave at `weights`, and fills in what `result` says of
  /// them; its shape is there. `slopes_of` gives the slopes for an element that moves by a step.
  void compare(TensorCheck& result, const std::vector<float>& weights, const std::vector<float>& gradient,
               const std::function<Slopes(std::int64_t index, double step)>& slopes_of) const;

 private:
  struct Element {
    std::int64_t index = 0;
    double backward = 0, difference = 0;
    double uncertain = 0;  ///< of the difference
    bool kink = false;  ///< the slopes on both sides of the weight differ, and the backward lies between them
    double size() const;
    double apart() const;
    double error() const { return size() > 0 ? apart() / size() : 0; }
    bool resolved() const;
  };
  /// Half of them where the backward has a gradient, as rows of an embedding that no token names have none;
  /// those with the largest gradients first.
  std::vector<Element> sample(const std::vector<float>& gradient) const;
  /// True where the loss has a kink at the weight itself, as behind a ReLU of a sum that is exactly 0: the
  /// slopes on both sides stay apart as steps become smaller, and each between them is right.
  bool at_kink(const Element& element, const Slopes& wide, const Slopes& narrow, double largest) const;
  bool is_wrong(const Element& element, double largest) const;
  void judge(TensorCheck& result, const std::vector<Element>& elements, const std::vector<float>& gradient,
             double largest) const;
  /// "its gradient is -1 times what it should be ..." where all elements are off by one factor; else empty.
  std::string factor_of(const std::vector<Element>& elements) const;
  bool transposed(const Shape& shape, const std::vector<Element>& elements,
                  const std::vector<float>& gradient, double largest) const;

  const GradientCheckOptions& options_;
  double scale_, tokens_;
};

}  // namespace tranche::detail
