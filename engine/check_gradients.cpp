// Compares a model's backward with finite differences, using only the engine's public interface and
// StepGuard.

#include "tranche/engine/check_gradients.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/gradient_findings.h"
#include "engine/step_guard.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"

namespace tranche {

using namespace detail;

namespace {

std::string place_of(const Shape& shape, std::int64_t index) {
  std::string text;
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    text = std::to_string(index % shape[axis]) + (text.empty() ? "" : ", ") + text;
    index /= shape[axis];
  }
  return "[" + text + "]";
}

/// The beginning of every error about the caller's function, `micro_batches`.
constexpr const char* called = "check_gradients(): the micro-batches that it was given ";

class Check {
 public:
  Check(Engine& engine, const std::function<void()>& micro_batches, const GradientCheckOptions& options)
      : engine_(engine), micro_batches_(micro_batches), options_(options) {
    if (engine_.config().update == UpdateTime::as_reduced) {
      throw ConfigurationError(
          "check_gradients() takes steps that change nothing, and tranche.update: as_reduced has none: make "
          "an "
          "engine with at_the_boundary");
    }
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
    const double tokens =
        static_cast<double>(first.tokens) /
        static_cast<double>(engine_.config().accumulation_steps * engine_.runtime().mesh().data_ranks());
    const double scale = engine_.loss_gradient_scale();
    if (scale == 1) {
      result.notes.emplace_back(
          "loss_gradient_scale() is 1 with this batch, so a backward that leaves it out passes: check with "
          "more samples too");
    }
    const GradientFindings findings(options_, scale, tokens);
    auto gradient = gradients.begin();
    for (const UnitSpec& unit : engine_.model().units()) {
      for (const TensorSpec& tensor : unit.tensors) {
        result.tensors.push_back(check(unit, tensor, *gradient++, findings));
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
    if (mesh.size(MeshAxis::context) > 1) {
      throw ConfigurationError("check_gradients() on a mesh with the axis context (" + mesh.to_string() +
                               "), whose ranks have parts of each sample: check on one rank");
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

  /// Runs a step that changes nothing; `before_its_end` may read gradients.
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
  TensorCheck check(const UnitSpec& unit, const TensorSpec& tensor, const std::vector<float>& gradient,
                    const GradientFindings& findings) {
    TensorCheck result;
    result.unit = unit.name;
    result.tensor = tensor.name;
    result.shape = tensor.shape;
    result.frozen = engine_.frozen(tensor.name);
    if (result.frozen) return result;
    std::vector<float> weights = engine_.read_weight(tensor.name);
    findings.compare(result, weights, gradient, [&](std::int64_t index, double step) {
      return difference(tensor.name, weights, index, step);
    });
    engine_.write_weight(tensor.name, weights);
    return result;
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

  /// Restores weights while an exception unwinds. Only possible on a single rank, because peers may be at
  /// another point.
  void put_back(const std::string& tensor, const std::vector<float>& weights) noexcept {
    if (engine_.runtime().size() > 1) return;
    try {
      engine_.write_weight(tensor, weights);
    } catch (...) {  // the engine has ended; the unwinding exception has the reason
    }
  }

  Engine& engine_;
  const std::function<void()>& micro_batches_;
  const GradientCheckOptions& options_;
  double loss_ = 0;
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
      text += fmt::format("; {} too small against the rounding of the loss to be checked closely",
                          tensor.unresolved);
    }
    if (tensor.kinks > 0) {
      text += fmt::format("; {} at a kink of the loss, with backward between the slopes on its two sides",
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
                      "no gradient disagrees, but those of {} of {} tensors could not be checked: take fewer "
                      "samples, larger weights, or weights that give no sum of exactly 0\n",
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
