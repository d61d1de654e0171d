#include <fmt/core.h>

#include <cmath>

#include "optim/segments.h"
#include "tranche/core/error.h"
#include "tranche/kernels/optimizer_update.h"
#include "tranche/optim/optimizer.h"

namespace tranche {
namespace {

class Sgd final : public Optimizer {
 public:
  explicit Sgd(const SgdOptions& options) : options_(options) {
    // Negated comparisons, so that NaN is refused too.
    if (!(options.momentum >= 0) || !std::isfinite(options.momentum)) {
      throw InvalidArgument(
          fmt::format("SGD: momentum is {}; it must be finite and not negative", options.momentum));
    }
    if (!(options.weight_decay >= 0) || !std::isfinite(options.weight_decay)) {
      throw InvalidArgument(
          fmt::format("SGD: weight_decay is {}; it must be finite and not negative", options.weight_decay));
    }
    if (!std::isfinite(options.dampening)) {
      throw InvalidArgument(
          fmt::format("SGD: dampening is {}; it must be a finite number", options.dampening));
    }
    if (options.nesterov && (options.momentum == 0 || options.dampening != 0)) {
      throw InvalidArgument(
          fmt::format("SGD: nesterov needs a momentum above 0 and a dampening of 0, not {} and {}",
                      options.momentum, options.dampening));
    }
  }

  std::string name() const override { return "SGD"; }

  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override {
    if (options_.momentum == 0) return {};
    return {{"momentum_buffer", DataType::float32, 0}};
  }

  void check_group(const GroupOptions& group) const override {
    if (group.betas || group.epsilon) {
      throw InvalidArgument(
          fmt::format("SGD: a parameter group sets {}, which SGD has not", group.betas ? "betas" : "eps"));
    }
    (void)Sgd(of(group));
  }

  std::vector<std::byte> numbers(const OptimizerStep& step, const GroupOptions& group) const override {
    return bytes_of_numbers(arguments_of(step, group));
  }

  void apply(Stream& stream, const OptimizerStep&, const UpdateRange& range) const override {
    detail::check_states(name(), range, states());
    kernels::sgd_update(stream, detail::group_arguments<kernels::SgdArguments>(range),
                        detail::kernel_segments(range.segments), range.gradient, range.master,
                        states() == 1 ? range.state[0] : TensorView{}, range.weight);
  }

  std::string describe() const override {
    return fmt::format(
        R"({{"type": "SGD", "momentum": {}, "dampening": {}, "weight_decay": {}, "nesterov": {}}})",
        options_.momentum, options_.dampening, options_.weight_decay, options_.nesterov);
  }

 private:
  std::size_t states() const { return options_.momentum == 0 ? 0 : 1; }

  SgdOptions of(const GroupOptions& group) const {
    SgdOptions options = options_;
    options.weight_decay = group.decay ? group.weight_decay.value_or(options.weight_decay) : 0;
    return options;
  }

  kernels::SgdArguments arguments_of(const OptimizerStep& step, const GroupOptions& group) const {
    const double momentum = states() == 1 && step.momentum >= 0 ? step.momentum : options_.momentum;
    kernels::SgdArguments arguments;
    arguments.learning_rate = static_cast<float>(group.rate(step));
    arguments.momentum = static_cast<float>(momentum);
    arguments.dampening = static_cast<float>(options_.dampening);
    arguments.weight_decay = static_cast<float>(of(group).weight_decay);
    arguments.nesterov = options_.nesterov;
    arguments.first_step = step.step <= 1;
    arguments.gradient_scale = step.gradient_scale;
    arguments.apply = step.apply;
    return arguments;
  }

  SgdOptions options_;
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(const SgdOptions& options) {
  return std::make_unique<Sgd>(options);
}

}  // namespace tranche
