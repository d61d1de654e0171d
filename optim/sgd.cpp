#include <fmt/core.h>

#include <cmath>
#include <cstring>

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

  std::vector<OptimizerStateTensor> state() const override {
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

  void apply(Stream& stream, const OptimizerStep& step, const ShardView& shard,
             std::span<const double> /*reduced*/) const override {
    check(shard);
    kernels::sgd_update(stream, arguments_of(step, shard.group), shard.gradient, shard.master, buffer(shard),
                        shard.weight);
  }

  bool apply_segments(Stream& stream, const OptimizerStep& step, const ShardView& stretch,
                      std::span<const OptimizerSegment> segments) const override {
    check(stretch);
    check_segments(name(), stretch.master.elements(), segments);
    const GroupedSegments list = grouped(segments);
    std::vector<kernels::SgdArguments> groups;
    for (const GroupOptions& group : list.groups) groups.push_back(arguments_of(step, group));
    kernels::sgd_update_segments(stream, groups, list.segments, stretch.gradient, stretch.master,
                                 buffer(stretch), stretch.weight);
    return true;
  }

  std::int64_t argument_bytes() const override { return sizeof(kernels::SgdArguments); }

  void write_arguments(const OptimizerStep& step, const GroupOptions& group, void* arguments) const override {
    const kernels::SgdArguments written = arguments_of(step, group);
    std::memcpy(arguments, &written, sizeof(written));
  }

  void apply_with(Stream& stream, const void* arguments, const ShardView& shard) const override {
    check(shard);
    kernels::sgd_update(stream, static_cast<const kernels::SgdArguments*>(arguments), shard.gradient,
                        shard.master, buffer(shard), shard.weight);
  }

  std::string describe() const override {
    return fmt::format(
        R"({{"type": "SGD", "momentum": {}, "dampening": {}, "weight_decay": {}, "nesterov": {}}})",
        options_.momentum, options_.dampening, options_.weight_decay, options_.nesterov);
  }

 private:
  std::size_t states() const { return options_.momentum == 0 ? 0 : 1; }
  TensorView buffer(const ShardView& shard) const { return states() == 1 ? shard.state[0] : TensorView{}; }

  void check(const ShardView& shard) const {
    if (shard.state.size() != states()) {
      throw InvalidArgument(fmt::format("SGD: tensor '{}' comes with {} state tensors instead of {}",
                                        shard.tensor, shard.state.size(), states()));
    }
  }

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
