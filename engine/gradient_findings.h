#pragma once
/// Chooses the elements of a tensor whose gradient is compared with differences of the loss, and evaluates
/// the comparison. Private to engine/.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tranche/engine/check_gradients.h"

namespace tranche::detail {

/// Differences of the loss for one step of a weight.
struct Slopes {
  double central = 0, left = 0, right = 0;
};

/// Compares one tensor after another. It does not use the engine: the caller computes the loss.
class GradientFindings {
 public:
  /// `options` must outlive it. `scale` and `tokens` of a rank's micro-batch are factors that a wrong
  /// backward may have left out.
  GradientFindings(const GradientCheckOptions& options, double scale, double tokens)
      : options_(options), scale_(scale), tokens_(tokens) {}

  /// Compares elements of `gradient`, which the backward computed at `weights`, and fills in `result`, whose
  /// shape must be set. `slopes_of` returns the slopes for an element that changes by a step.
  void compare(TensorCheck& result, const std::vector<float>& weights, const std::vector<float>& gradient,
               const std::function<Slopes(std::int64_t index, double step)>& slopes_of) const;

 private:
  struct Element {
    std::int64_t index = 0;
    double backward = 0, difference = 0;
    double uncertain = 0;  ///< the error of the difference
    bool kink = false;     ///< the slopes on both sides differ, and the backward lies between them
    double size() const;
    double apart() const;
    double error() const { return size() > 0 ? apart() / size() : 0; }
    bool resolved() const;
  };
  /// Draws elements. Half of them have a gradient from the backward, because, for example, embedding rows of
  /// unused tokens have none; those with the largest gradients are first.
  std::vector<Element> sample(const std::vector<float>& gradient) const;
  /// True if the loss has a kink at the weight itself, such as a ReLU of a sum that is exactly 0: the slopes
  /// on both sides remain different for smaller steps, and any value between them is right.
  bool at_kink(const Element& element, const Slopes& wide, const Slopes& narrow, double largest) const;
  bool is_wrong(const Element& element, double largest) const;
  void judge(TensorCheck& result, const std::vector<Element>& elements, const std::vector<float>& gradient,
             double largest) const;
  /// "its gradient is -1 times what it should be ..." if all elements are wrong by the same factor; otherwise
  /// empty.
  std::string factor_of(const std::vector<Element>& elements) const;
  bool transposed(const Shape& shape, const std::vector<Element>& elements,
                  const std::vector<float>& gradient, double largest) const;

  const GradientCheckOptions& options_;
  double scale_, tokens_;
};

}  // namespace tranche::detail
