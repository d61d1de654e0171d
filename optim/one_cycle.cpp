#include <fmt/core.h>

#include <cmath>

#include "tranche/core/error.h"
#include "tranche/optim/schedule.h"

namespace tranche {
namespace {

class OneCycle final : public Schedule {
 public:
  explicit OneCycle(const OneCycleOptions& options) : options_(options) {
    const std::int64_t second = options.cycle_second_step_size.value_or(options.cycle_first_step_size);
    if (options.cycle_first_step_size < 1 || second < 1) {
      throw InvalidArgument(fmt::format("cycle step sizes are {} and {}; both must be at least 1",
                                        options.cycle_first_step_size, second));
    }
    second_stairs_ = options.cycle_second_stair_count.value_or(options.cycle_first_stair_count);
    if (options.cycle_first_stair_count < 0 || second_stairs_ < 0 || options.decay_step_size < 0) {
      throw InvalidArgument("stair counts and decay_step_size of a one-cycle schedule must not be negative");
    }
    for (const double rate : {options.cycle_min_lr, options.cycle_max_lr, options.decay_lr_rate,
                              options.cycle_min_mom, options.cycle_max_mom, options.decay_mom_rate}) {
      if (!std::isfinite(rate))
        throw InvalidArgument("a rate of a one-cycle schedule is not a finite number");
    }
    first_ = static_cast<double>(options.cycle_first_step_size);
    second_ = static_cast<double>(second);
    total_ = first_ + second_;
    ratio_ = first_ / total_;
  }

  double learning_rate(std::int64_t step) const override {
    const auto iteration = static_cast<double>(step - 1);
    if (iteration < total_) {
      return options_.cycle_min_lr + (options_.cycle_max_lr - options_.cycle_min_lr) * height(iteration + 1);
    }
    if (options_.decay_step_size == 0 || options_.decay_lr_rate == 0) return options_.cycle_min_lr;
    return options_.cycle_min_lr / (1 + options_.decay_lr_rate * intervals(iteration));
  }

  double momentum(std::int64_t step) const override {
    if (!options_.cycle_momentum) return -1;
    const auto iteration = static_cast<double>(step - 1);
    if (iteration < total_) {
      return options_.cycle_max_mom -
             (options_.cycle_max_mom - options_.cycle_min_mom) * height(iteration + 1);
    }
    if (options_.decay_step_size == 0 || options_.decay_mom_rate == 0) return options_.cycle_max_mom;
    return options_.cycle_max_mom * (1 + options_.decay_mom_rate * intervals(iteration));
  }

  std::string describe() const override {
    const OneCycleOptions& o = options_;
    return fmt::format(
        R"({{"type": "OneCycle", "cycle_min_lr": {}, "cycle_max_lr": {}, "decay_lr_rate": {}, )"
        R"("cycle_first_step_size": {}, "cycle_second_step_size": {}, "cycle_first_stair_count": {}, )"
        R"("cycle_second_stair_count": {}, "decay_step_size": {}, "cycle_momentum": {}, )"
        R"("cycle_min_mom": {}, )"
        R"("cycle_max_mom": {}, "decay_mom_rate": {}}})",
        o.cycle_min_lr, o.cycle_max_lr, o.decay_lr_rate, o.cycle_first_step_size,
        o.cycle_second_step_size.value_or(o.cycle_first_step_size), o.cycle_first_stair_count, second_stairs_,
        o.decay_step_size, o.cycle_momentum, o.cycle_min_mom, o.cycle_max_mom, o.decay_mom_rate);
  }

 private:
  double intervals(double iteration) const {
    return (iteration - total_ + 1) / static_cast<double>(options_.decay_step_size);
  }
  /// The height within the cycle at `position` in (0, total]: 0 at both ends, 1 at the peak.
  double height(double position) const {
    const double cycle = std::floor(1 + position / total_);
    const double x = 1.0 + position / total_ - cycle;
    const bool rising = x <= ratio_;
    const std::int64_t stairs = rising ? options_.cycle_first_stair_count : second_stairs_;
    if (stairs == 0) return rising ? x / ratio_ : (x - 1) / (ratio_ - 1);
    // The stair is computed from the whole position, because rounding puts x just below 1 at some peaks.
    const auto count = static_cast<double>(stairs);
    const double within = std::fmod(position, total_);
    const double stair = within <= first_ ? within * count / first_ : (total_ - within) * count / second_;
    return std::floor(stair) / count;
  }

  OneCycleOptions options_;
  double first_ = 1, second_ = 1, total_ = 2, ratio_ = 0.5;
  std::int64_t second_stairs_ = 0;
};

}  // namespace

std::unique_ptr<Schedule> make_one_cycle_schedule(const OneCycleOptions& options) {
  return std::make_unique<OneCycle>(options);
}

}  // namespace tranche
