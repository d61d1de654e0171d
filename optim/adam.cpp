#include <fmt/core.h>

#include <cmath>

#include "optim/segments.h"
#include "tranche/core/error.h"
#include "tranche/kernels/optimizer_update.h"
#include "tranche/optim/optimizer.h"

namespace tranche {
namespace {

class Adam final : public Optimizer {
 public:
  explicit Adam(const AdamOptions& options) : options_(options) {
    // Negated comparisons, so that NaN is refused too.
    const auto is_share = [](double beta) { return beta >= 0 && beta < 1; };
    if (!is_share(options.beta1) || !is_share(options.beta2)) {
      throw InvalidArgument(fmt::format("{}: betas are [{}, {}]; each must be at least 0 and below 1", name(),
                                        options.beta1, options.beta2));
    }
    if (!(options.epsilon >= 0) || !std::isfinite(options.epsilon)) {
      throw InvalidArgument(
          fmt::format("{}: eps is {}; it must be finite and not negative", name(), options.epsilon));
    }
    if (!(options.weight_decay >= 0) || !std::isfinite(options.weight_decay)) {
      throw InvalidArgument(fmt::format("{}: weight_decay is {}; it must be finite and not negative", name(),
                                        options.weight_decay));
    }
    if (options.moment_dtype != DataType::float32 && options.moment_dtype != DataType::bfloat16) {
      throw InvalidArgument(fmt::format("{}: moments can be kept in fp32 or bf16, not {}", name(),
                                        name_of(options.moment_dtype)));
    }
  }

  std::string name() const override { return options_.decoupled ? "AdamW" : "Adam"; }

  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override {
    return {{"exp_avg", options_.moment_dtype, 0}, {"exp_avg_sq", options_.moment_dtype, 0}};
  }

  void check_group(const GroupOptions& group) const override { (void)Adam(of(group)); }

  std::vector<std::byte> numbers(const OptimizerStep& step, const GroupOptions& group) const override {
    return bytes_of_numbers(arguments_of(step, group));
  }

  void apply(Stream& stream, const OptimizerStep&, const UpdateRange& range) const override {
    detail::check_states(name(), range, 2);
    kernels::adam_update(stream, detail::group_arguments<kernels::AdamArguments>(range),
                         detail::kernel_segments(range.segments), range.gradient, range.master,
                         range.state[0], range.state[1], range.weight);
  }

  std::string describe() const override {
    return fmt::format(
        R"({{"type": "{}", "betas": [{}, {}], "eps": {}, "weight_decay": {}, "moments": "{}"}})", name(),
        options_.beta1, options_.beta2, options_.epsilon, options_.weight_decay,
        name_of(options_.moment_dtype));
  }

 private:
  AdamOptions of(const GroupOptions& group) const {
    AdamOptions options = options_;
    if (group.betas) {
      options.beta1 = (*group.betas)[0];
      options.beta2 = (*group.betas)[1];
    }
    options.epsilon = group.epsilon.value_or(options.epsilon);
    options.weight_decay = group.decay ? group.weight_decay.value_or(options.weight_decay) : 0;
    return options;
  }

  kernels::AdamArguments arguments_of(const OptimizerStep& step, const GroupOptions& group) const {
    if (step.step < 1)
      throw InvalidArgument(fmt::format("{}: update number {} is below 1", name(), step.step));
    const AdamOptions options = of(group);
    const double rate = group.rate(step);
    const bool cycled = step.momentum >= 0 && !group.betas;
    // The kernel takes betas in fp32; the corrections must be those of the very same betas, or the first
    // steps are off by their rounding (1 - 0.999 loses five digits).
    const auto beta1 = static_cast<float>(cycled ? step.momentum : options.beta1);
    const auto beta2 = static_cast<float>(options.beta2);
    const auto t = static_cast<double>(step.step);
    kernels::AdamArguments arguments;
    arguments.learning_rate = static_cast<float>(rate);
    arguments.beta1 = beta1;
    arguments.beta2 = beta2;
    arguments.weight_decay = static_cast<float>(options.weight_decay);
    // In double, rounded once: 1 - beta^t loses most of fp32's digits for small t.
    const double correction = std::sqrt(1 - std::pow(double{beta2}, t));
    arguments.step_size = static_cast<float>(rate * correction / (1 - std::pow(double{beta1}, t)));
    arguments.corrected_epsilon = static_cast<float>(options.epsilon * correction);
    arguments.gradient_scale = step.gradient_scale;
    arguments.decoupled = options_.decoupled;
    arguments.apply = step.apply;
    return arguments;
  }

  AdamOptions options_;
};

}  // namespace

std::unique_ptr<Optimizer> make_adam(const AdamOptions& options) {
  return std::make_unique<Adam>(options);
}

}  // namespace tranche
