#include "engine/gradient_findings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "tranche/core/random.h"

namespace tranche::detail {

namespace {

/// The number of step sizes that are tried, each a quarter of the one before; the first is a quarter of the
/// weights' size, or of 1.
constexpr int step_sizes = 6;
/// The number of elements on which all sizes are tried. The tensor is compared at the size whose slopes agree
/// best with those of the next.
constexpr std::size_t probes = 3;
/// The error of a difference is estimated from two of them; up to so many times this estimate is accepted.
constexpr double certainty = 3;
/// An element is resolved if its estimated error is at most this fraction of it.
constexpr double resolved_error = 0.1;
/// Sums in fp32 cause an error of this fraction of a tensor's largest gradient in its small ones.
constexpr double rounding = 1e-5;

/// Removes the second-order term from the slopes with a step and with a quarter of it.
double extrapolated(double wide, double narrow) {
  return (16 * narrow - wide) / 15;
}

}  // namespace

double GradientFindings::Element::size() const {
  return std::max(std::abs(backward), std::abs(difference));
}

double GradientFindings::Element::apart() const {
  return std::abs(backward - difference);
}

bool GradientFindings::Element::resolved() const {
  return uncertain <= resolved_error * size();
}

void GradientFindings::compare(
    TensorCheck& result, const std::vector<float>& weights, const std::vector<float>& gradient,
    const std::function<Slopes(std::int64_t index, double step)>& slopes_of) const {
  double squares = 0, largest = 0;
  for (const float weight : weights) squares += static_cast<double>(weight) * weight;
  for (const float each : gradient) largest = std::max(largest, std::abs(static_cast<double>(each)));
  const double size = std::max(1.0, std::sqrt(squares / static_cast<double>(weights.size())));

  std::vector<Element> elements = sample(gradient);
  // Computes slopes for `count` + 1 steps, starting with number `first`: large steps suffer from curvature,
  // small ones from the loss's rounding.
  const auto raw_slopes = [&](std::int64_t index, int first, int count) {
    std::vector<Slopes> found;
    for (int step = first; step <= first + count; ++step) {
      found.push_back(slopes_of(index, size * std::ldexp(1.0, -2 * (step + 1))));
    }
    return found;
  };
  const auto slopes = [](const std::vector<Slopes>& raw) {
    std::vector<double> found;
    for (std::size_t i = 1; i < raw.size(); ++i)
      found.push_back(extrapolated(raw[i - 1].central, raw[i].central));
    return found;
  };
  std::vector<double> disagreement(step_sizes - 2, 0.0);
  for (std::size_t p = 0; p < std::min(probes, elements.size()); ++p) {
    const std::vector<double> found = slopes(raw_slopes(elements[p].index, 0, step_sizes - 1));
    for (std::size_t step = 0; step < disagreement.size(); ++step) {
      const double apart = std::abs(found[step] - found[step + 1]);
      disagreement[step] += std::isfinite(apart) ? apart * apart : std::numeric_limits<double>::infinity();
    }
  }
  const auto best = std::min_element(disagreement.begin(), disagreement.end());
  std::vector<double> uncertain;
  std::vector<std::vector<Slopes>> sides;
  for (Element& element : elements) {
    sides.push_back(raw_slopes(element.index, static_cast<int>(best - disagreement.begin()), 2));
    const std::vector<double> found = slopes(sides.back());
    element.difference = found[0];
    const double apart = std::abs(found[0] - found[1]);
    element.uncertain = std::isfinite(apart) ? apart : std::numeric_limits<double>::infinity();
    uncertain.push_back(element.uncertain);
  }
  // Two differences may agree by chance, so the error is at least that of three quarters of the elements.
  const auto most = uncertain.begin() + static_cast<std::ptrdiff_t>(uncertain.size() * 3 / 4);
  std::nth_element(uncertain.begin(), most, uncertain.end());
  for (std::size_t e = 0; e < elements.size(); ++e) {
    Element& element = elements[e];
    element.uncertain = std::max(element.uncertain, *most);
    element.kink = at_kink(element, sides[e][1], sides[e][2], largest);
  }
  judge(result, elements, gradient, largest);
}

std::vector<GradientFindings::Element> GradientFindings::sample(const std::vector<float>& gradient) const {
  const auto count = static_cast<std::int64_t>(gradient.size());
  std::vector<std::int64_t> wanted, with_gradient;
  for (std::int64_t i = 0; i < count; ++i) {
    if (count <= options_.elements) wanted.push_back(i);
    if (gradient[static_cast<std::size_t>(i)] != 0) with_gradient.push_back(i);
  }
  const RandomKey key{.seed = options_.seed, .subject = static_cast<std::uint64_t>(count)};
  const auto most_draws = 8 * static_cast<std::uint64_t>(options_.elements);  // some are repeated
  for (std::uint64_t draw = 0;
       static_cast<std::int64_t>(wanted.size()) < std::min(count, options_.elements) && draw < most_draws;
       ++draw) {
    const std::uint64_t bits =
        random_bits(key, 2 * draw) * (std::uint64_t{1} << 32) + random_bits(key, 2 * draw + 1);
    const bool among = draw % 2 == 0 && !with_gradient.empty();
    const std::int64_t drawn = among ? with_gradient[bits % with_gradient.size()]
                                     : static_cast<std::int64_t>(bits % gradient.size());
    if (std::find(wanted.begin(), wanted.end(), drawn) == wanted.end()) wanted.push_back(drawn);
  }
  std::vector<Element> elements;
  for (const std::int64_t index : wanted) {
    elements.push_back({.index = index, .backward = gradient[static_cast<std::size_t>(index)]});
  }
  std::stable_sort(elements.begin(), elements.end(), [](const Element& a, const Element& b) {
    return std::abs(a.backward) > std::abs(b.backward);
  });
  return elements;
}

bool GradientFindings::at_kink(const Element& element, const Slopes& wide, const Slopes& narrow,
                               double largest) const {
  const double apart = std::abs(narrow.right - narrow.left);
  const double noise =
      certainty * element.uncertain + options_.tolerance * element.size() + rounding * largest;
  if (!(apart > noise) || apart < 0.5 * std::abs(wide.right - wide.left)) return false;
  const auto [low, high] = std::minmax(narrow.left, narrow.right);
  return low - noise <= element.backward && element.backward <= high + noise;
}

bool GradientFindings::is_wrong(const Element& element, double largest) const {
  // A difference of losses that are not finite proves nothing.
  return !element.kink && element.apart() > certainty * element.uncertain +
                                                options_.tolerance * element.size() + rounding * largest;
}

void GradientFindings::judge(TensorCheck& result, const std::vector<Element>& elements,
                             const std::vector<float>& gradient, double largest) const {
  const Element* worst = nullptr;
  bool told = false;
  for (const Element& element : elements) {
    const bool wrong = is_wrong(element, largest);
    ++result.checked;
    result.wrong += wrong ? 1 : 0;
    if (element.kink) {
      ++result.kinks;
    } else if (element.size() > 0 && !element.resolved()) {
      ++result.unresolved;
    } else {
      told = told || element.size() > 0;
    }
    const auto rank = [&](const Element& e) {
      return std::tuple(is_wrong(e, largest), e.resolved(), e.error());
    };
    if (worst == nullptr || rank(element) > rank(*worst)) worst = &element;
  }
  result.told = told;
  result.untold = !told && result.unresolved + result.kinks > 0;
  result.worst = worst->index;
  result.backward = worst->backward;
  result.difference = worst->difference;
  result.error = worst->error();
  if (result.wrong == 0) return;
  if (largest == 0) {
    result.finding = "nothing is added to its gradient, which is 0 everywhere, but the loss depends on it";
  } else if (const std::string factor = factor_of(elements); !factor.empty()) {
    result.finding = factor;
  } else if (transposed(result.shape, elements, gradient, largest)) {
    result.finding = "its gradient is transposed";
  } else {
    result.finding = fmt::format("{} of {} elements are wrong: a term is missing, or a wrong one is added",
                                 result.wrong, result.checked);
  }
}

std::string GradientFindings::factor_of(const std::vector<Element>& elements) const {
  std::vector<Element> clear;
  for (const Element& element : elements) {
    const double size = std::abs(element.difference);
    if (size > 0 && element.uncertain <= resolved_error * size) clear.push_back(element);
  }
  if (clear.empty() || (clear.size() == 1 && elements.size() > 1)) return {};
  const auto ratio = [](const Element& element) { return element.backward / element.difference; };
  const auto middle = clear.begin() + static_cast<std::ptrdiff_t>(clear.size() / 2);
  std::nth_element(clear.begin(), middle, clear.end(),
                   [&](const Element& a, const Element& b) { return ratio(a) < ratio(b); });
  const double factor = ratio(*middle);
  for (const Element& element : clear) {
    const double slack = options_.tolerance + certainty * element.uncertain / std::abs(element.difference);
    if (std::abs(ratio(element) / factor - 1) > 2 * slack) return {};
  }
  std::string reasons;
  const auto suspect = [&](double wanted, const char* reason) {
    if (std::abs(factor / wanted - 1) > 0.02) return;
    reasons += (reasons.empty() ? ": " : ", or ") + std::string(reason);
  };
  suspect(-1, "the sign is swapped");
  if (scale_ != 1) {
    suspect(1 / scale_, "the loss's gradient is not multiplied by loss_gradient_scale()");
    suspect(scale_, "loss_gradient_scale() is multiplied in twice");
  }
  if (tokens_ != 1) suspect(1 / tokens_, "it is the gradient of the mean loss, not of the sum");
  return fmt::format("its gradient is {:.4g} times what it should be, in all elements{}", factor, reasons);
}

bool GradientFindings::transposed(const Shape& shape, const std::vector<Element>& elements,
                                  const std::vector<float>& gradient, double largest) const {
  if (shape.rank() != 2 || shape[0] == 1 || shape[1] == 1) return false;
  return std::all_of(elements.begin(), elements.end(), [&](const Element& element) {
    const std::int64_t row = element.index / shape[1], column = element.index % shape[1];
    Element turned = element;
    turned.backward = gradient[static_cast<std::size_t>(column * shape[0] + row)];
    return !is_wrong(turned, largest);
  });
}

}  // namespace tranche::detail
