// Finite differences against a model's backward. But for the end of a step that an exception left open, the
// public face is enough.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine_impl.h"
#include "tranche/core/error.h"
#include "tranche/core/random.h"
#include "tranche/engine/check_gradients.h"
#include "tranche/engine/engine.h"

namespace tranche {

/// Gives up the step that is open where its scope ends.
class StepGuard {
 public:
  explicit StepGuard(Engine& engine) : engine_(engine) {}
  ~StepGuard() { engine_.impl_->abandon_step(); }
  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;

 private:
  Engine& engine_;
};

namespace {

/// Steps of the differences that are tried, each a quarter of the one before; the first is a quarter of the
/// weights' size, or of 1.
constexpr int step_sizes = 6;
/// Elements on which all of them are tried: the tensor is compared with the step whose slopes agree best with
/// those of the next.
constexpr std::size_t probes = 3;
/// Errors of differences are estimated from two of them; so many estimates are let pass.
constexpr double certainty = 3;
/// An element counts as resolved where its error by that estimate is at most so much of it.
constexpr double resolved_error = 0.1;
/// Sums in fp32 leave so much of a tensor's largest gradient in the small ones.
constexpr double rounding = 1e-5;

/// The slope without its second-order term, of differences with a step and with a quarter of it.
double extrapolated(double wide, double narrow) {
  return (16 * narrow - wide) / 15;
}

/// Differences of the loss with one step.
struct Slopes {
  double central = 0, left = 0, right = 0;
};

struct Element {
  std::int64_t index = 0;
  double backward = 0, difference = 0;
  double uncertain = 0;  ///< of the difference
  bool kink = false;  ///< the slopes on both sides of the weight differ, and the backward lies between them
  double size() const { return std::max(std::abs(backward), std::abs(difference)); }
  double apart() const { return std::abs(backward - difference); }
  double error() const { return size() > 0 ? apart() / size() : 0; }
  bool resolved() const { return uncertain <= resolved_error * size(); }
};

std::string place_of(const Shape& shape, std::int64_t index) {
  std::string text;
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    text = std::to_string(index % shape[axis]) + (text.empty() ? "" : ", ") + text;
    index /= shape[axis];
  }
  return "[" + text + "]";
}

/// The start of what is said of a function that is not as it must be.
constexpr const char* called = "check_gradients(): the micro-batches that it was given ";

class Check {
 public:
  Check(Engine& engine, const std::function<void()>& micro_batches, const GradientCheckOptions& options)
      : engine_(engine), micro_batches_(micro_batches), options_(options) {
    require_fp32();
    engine_.set_gradient_hook([](const StepResult&) { return std::string("check_gradients()"); });
  }
  ~Check() { engine_.set_gradient_hook({}); }
  Check(const Check&) = delete;
  Check& operator=(const Check&) = delete;

  GradientCheck run() {
    GradientCheck result;
    std::vector<std::vector<float>> gradients;
    const StepResult first = pass([&] {
      for (const UnitSpec& unit : engine_.model().units()) {
        for (const TensorSpec& tensor : unit.tensors) {
          gradients.push_back(engine_.frozen(tensor.name) ? std::vector<float>{}
                                                          : engine_.read_gradient(tensor.name));
        }
      }
    });
    if (!std::isfinite(first.loss)) {
      throw NumericalError(fmt::format("check_gradients(): the loss is {}", first.loss));
    }
    if (first.skipped_because != "the gradient hook: check_gradients()") {
      throw NumericalError("check_gradients(): " + first.skipped_because);
    }
    const double again = pass().loss;
    if (!(again == first.loss)) {
      throw LogicError(fmt::format(
          "{}gave a loss of {} and then one of {}: give the same batch each time, and dropout the same seeds",
          called, first.loss, again));
    }
    result.loss = loss_ = first.loss;
    tokens_ = static_cast<double>(first.tokens) / static_cast<double>(engine_.config().accumulation_steps *
                                                                      engine_.runtime().mesh().data_ranks());
    scale_ = engine_.loss_gradient_scale();
    if (scale_ == 1) {
      result.notes.emplace_back(
          "loss_gradient_scale() is 1 with this batch, so a backward that leaves it out passes: check with "
          "more samples too");
    }
    auto gradient = gradients.begin();
    for (const UnitSpec& unit : engine_.model().units()) {
      for (const TensorSpec& tensor : unit.tensors) {
        result.tensors.push_back(check(unit, tensor, *gradient++));
      }
    }
    return result;
  }

 private:
  void require_fp32() const {
    if (engine_.device().kind() == DeviceKind::meta) {
      throw ConfigurationError(
          "check_gradients() on the meta device, which computes nothing: check on cpu or cuda");
    }
    const Mesh& mesh = engine_.runtime().mesh();
    if (mesh.size(MeshAxis::pipeline) > 1) {
      throw ConfigurationError("check_gradients() on a mesh with a pipeline (" + mesh.to_string() +
                               "), whose micro-batches are a schedule's: check on one rank");
    }
    if (mesh.size(MeshAxis::tensor) > 1) {
      throw ConfigurationError("check_gradients() on a mesh with the axis tensor (" + mesh.to_string() +
                               "), whose ranks have parts of each tensor: check on one rank");
    }
    const Config& config = engine_.config();
    for (const auto& [what, dtype] : {std::pair("computes", config.precision.compute),
                                      std::pair("reduces", config.precision.communication),
                                      std::pair("accumulates", config.precision.accumulation)}) {
      if (dtype == DataType::float32) continue;
      throw ConfigurationError(fmt::format(
          "check_gradients() compares in fp32, but the engine {} in {}: make one whose configuration has "
          "neither bf16 nor fp16, nor data_types or communication_data_type of them",
          what, name_of(dtype)));
    }
    if (config.quantized_weights || config.quantized_gradients) {
      throw ConfigurationError(
          "check_gradients() compares in fp32, but weights or gradients travel as int8 blocks: make an "
          "engine "
          "without zero_quantized_weights and zero_quantized_gradients");
    }
    if (options_.elements < 1) throw InvalidArgument("check_gradients() of 0 elements of a tensor");
  }

  /// A step that changes nothing; `before_its_end` may read gradients.
  StepResult pass(const std::function<void()>& before_its_end = {}) {
    const std::int64_t steps = engine_.steps();
    const StepGuard guard(engine_);
    micro_batches_();
    if (engine_.steps() != steps) {
      throw LogicError(std::string(called) + "called step(): it is for check_gradients() to end the step");
    }
    if (before_its_end) before_its_end();
    return engine_.step();
  }

  /// Checks one tensor and restores its weights.
  TensorCheck check(const UnitSpec& unit, const TensorSpec& tensor, const std::vector<float>& gradient) {
    TensorCheck result;
    result.unit = unit.name;
    result.tensor = tensor.name;
    result.shape = tensor.shape;
    result.frozen = engine_.frozen(tensor.name);
    if (result.frozen) return result;
    std::vector<float> weights = engine_.read_weight(tensor.name);
    double squares = 0, largest = 0;
    for (const float weight : weights) squares += static_cast<double>(weight) * weight;
    for (const float each : gradient) largest = std::max(largest, std::abs(static_cast<double>(each)));
    const double size = std::max(1.0, std::sqrt(squares / static_cast<double>(weights.size())));

    std::vector<Element> elements = sample(gradient);
    // Slopes of `count` steps from `first` on, each with the next: large steps are curved, small ones drown
    // in the loss's rounding.
    const auto raw_slopes = [&](std::int64_t index, int first, int count) {
      std::vector<Slopes> found;
      for (int step = first; step <= first + count; ++step) {
        found.push_back(difference(tensor.name, weights, index, size * std::ldexp(1.0, -2 * (step + 1))));
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
    engine_.write_weight(tensor.name, weights);
    // Two differences may agree by chance: what most of the tensor's elements show holds for all.
    const auto most = uncertain.begin() + static_cast<std::ptrdiff_t>(uncertain.size() * 3 / 4);
    std::nth_element(uncertain.begin(), most, uncertain.end());
    for (std::size_t e = 0; e < elements.size(); ++e) {
      Element& element = elements[e];
      element.uncertain = std::max(element.uncertain, *most);
      element.kink = at_kink(element, sides[e][1], sides[e][2], largest);
    }
    judge(result, elements, gradient, largest);
    return result;
  }

  /// Half of them where the backward has a gradient, as rows of an embedding that no token names have none;
  /// those with the largest gradients first.
  std::vector<Element> sample(const std::vector<float>& gradient) const {
    const auto count = static_cast<std::int64_t>(gradient.size());
    std::vector<std::int64_t> wanted, with_gradient;
    for (std::int64_t i = 0; i < count; ++i) {
      if (count <= options_.elements) wanted.push_back(i);
      if (gradient[static_cast<std::size_t>(i)] != 0) with_gradient.push_back(i);
    }
    const RandomKey key{.seed = options_.seed, .subject = static_cast<std::uint64_t>(count)};
    const auto most_draws = 8 * static_cast<std::uint64_t>(options_.elements);  // some are drawn again
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

  /// True where the loss has a kink at the weight itself, as behind a ReLU of a sum that is exactly 0: the
  /// slopes on both sides stay apart as steps become smaller, and each between them is right.
  bool at_kink(const Element& element, const Slopes& wide, const Slopes& narrow, double largest) const {
    const double apart = std::abs(narrow.right - narrow.left);
    const double noise =
        certainty * element.uncertain + options_.tolerance * element.size() + rounding * largest;
    if (!(apart > noise) || apart < 0.5 * std::abs(wide.right - wide.left)) return false;
    const auto [low, high] = std::minmax(narrow.left, narrow.right);
    return low - noise <= element.backward && element.backward <= high + noise;
  }

  Slopes difference(const std::string& tensor, std::vector<float>& weights, std::int64_t index, double step) {
    float& weight = weights[static_cast<std::size_t>(index)];
    const float kept = weight;
    const auto above = static_cast<float>(kept + step), below = static_cast<float>(kept - step);
    double losses[2] = {};
    try {
      for (int i = 0; i < 2; ++i) {
        weight = i == 0 ? above : below;
        engine_.write_weight(tensor, weights);
        losses[i] = pass().loss;
      }
    } catch (...) {
      weight = kept;
      put_back(tensor, weights);
      throw;
    }
    weight = kept;
    const double up = static_cast<double>(above) - kept, down = kept - static_cast<double>(below);
    return {(losses[0] - losses[1]) / (up + down), (loss_ - losses[1]) / down, (losses[0] - loss_) / up};
  }

  /// Writes weights back while an exception unwinds. Only on a rank that is alone, as peers may be elsewhere.
  void put_back(const std::string& tensor, const std::vector<float>& weights) noexcept {
    if (engine_.runtime().size() > 1) return;
    try {
      engine_.write_weight(tensor, weights);
    } catch (...) {  // the engine has ended; what unwinds says why
    }
  }

  bool is_wrong(const Element& element, double largest) const {
    // A difference that is not finite, of a loss that is not, says nothing.
    return !element.kink && element.apart() > certainty * element.uncertain +
                                                  options_.tolerance * element.size() + rounding * largest;
  }

  void judge(TensorCheck& result, const std::vector<Element>& elements, const std::vector<float>& gradient,
             double largest) const {
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
      result.finding =
          fmt::format("{} of {} elements: a term is missing, or another", result.wrong, result.checked);
    }
  }

  /// "is -1 times what it should be: ..." where all elements are off by one factor; else empty.
  std::string factor_of(const std::vector<Element>& elements) const {
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

  bool transposed(const Shape& shape, const std::vector<Element>& elements,
                  const std::vector<float>& gradient, double largest) const {
    if (shape.rank() != 2 || shape[0] == 1 || shape[1] == 1) return false;
    return std::all_of(elements.begin(), elements.end(), [&](const Element& element) {
      const std::int64_t row = element.index / shape[1], column = element.index % shape[1];
      Element turned = element;
      turned.backward = gradient[static_cast<std::size_t>(column * shape[0] + row)];
      return !is_wrong(turned, largest);
    });
  }

  Engine& engine_;
  const std::function<void()>& micro_batches_;
  const GradientCheckOptions& options_;
  double loss_ = 0;
  double scale_ = 1;
  double tokens_ = 1;  ///< of a rank's micro-batch, on average
};

}  // namespace

bool GradientCheck::passed() const {
  const auto right = [](const TensorCheck& tensor) { return tensor.finding.empty(); };
  const auto told = [](const TensorCheck& tensor) { return tensor.told; };
  return std::all_of(tensors.begin(), tensors.end(), right) &&
         std::any_of(tensors.begin(), tensors.end(), told);
}

std::string GradientCheck::text() const {
  std::string text = fmt::format("gradients against central differences of the loss, {:.6g}\n", loss);
  std::string unit, last_wrong;
  std::size_t wrong = 0, untold = 0, told = 0;
  for (const TensorCheck& tensor : tensors) {
    if (tensor.unit != unit) text += fmt::format("unit {}\n", unit = tensor.unit);
    text += fmt::format("  {} {}: ", tensor.tensor, tensor.shape.to_string());
    if (tensor.frozen) {
      text += "frozen, not checked\n";
      continue;
    }
    text += fmt::format("{} of {} elements, worst {}: backward {:.6g}, difference {:.6g}, error {:.2g}",
                        tensor.checked, tensor.shape.elements(), place_of(tensor.shape, tensor.worst),
                        tensor.backward, tensor.difference, tensor.error);
    if (tensor.unresolved > 0) {
      text +=
          fmt::format("; {} too small beside the loss's rounding to say more than that", tensor.unresolved);
    }
    if (tensor.kinks > 0) {
      text +=
          fmt::format("; {} where the loss has a kink, whose slopes on both sides the backward lies between",
                      tensor.kinks);
    }
    untold += tensor.untold ? 1 : 0;
    told += tensor.told ? 1 : 0;
    text += "\n";
    if (tensor.finding.empty()) continue;
    text += "    WRONG: " + tensor.finding + "\n";
    last_wrong = tensor.unit;
    ++wrong;
  }
  for (const std::string& note : notes) text += "note: " + note + "\n";
  if (wrong == 0 && untold > 0) {
    return text + fmt::format(
                      "no gradient disagrees, but those of {} of {} tensors could not be told: take fewer "
                      "samples, larger weights, or weights of which no sum is exactly 0\n",
                      untold, tensors.size());
  }
  if (wrong == 0 && told == 0) {
    return text + "nothing was compared: every tensor is frozen, or has a gradient and differences of 0\n";
  }
  if (wrong == 0) return text + "all gradients agree\n";
  return text +
         fmt::format(
             "{} of {} tensors are wrong; begin with unit {}, as an error in what a unit hands back shows "
             "in all units before it\n",
             wrong, tensors.size(), last_wrong);
}

GradientCheck check_gradients(Engine& engine, const std::function<void()>& micro_batches,
                              const GradientCheckOptions& options) {
  return Check(engine, micro_batches, options).run();
}

}  // namespace tranche
