#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tranche/core/error.h"
#include "tranche/optim/schedule.h"

namespace tranche {
namespace {

void require_finite_parameter(const char* name, double value) {
  if (!std::isfinite(value))
    throw InvalidArgument(fmt::format("{} is {}; it must be a finite number", name, value));
}
void require_count(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least)
    throw InvalidArgument(fmt::format("{} is {}; it must be at least {}", name, value, least));
}

class RangeTest final : public Schedule {
 public:
  explicit RangeTest(const RangeTestOptions& options) : o_(options) {
    require_finite_parameter("lr_range_test_min_lr", o_.min_lr);
    require_finite_parameter("lr_range_test_step_rate", o_.step_rate);
    require_count("lr_range_test_step_size", o_.step_size, 1);
  }
  double learning_rate(std::int64_t step) const override {
    const double intervals = static_cast<double>(step) / static_cast<double>(o_.step_size);
    return o_.min_lr * (1 + o_.step_rate * (o_.staircase ? std::floor(intervals) : intervals));
  }
  std::string describe() const override {
    return fmt::format(
        R"({{"type": "LRRangeTest", "lr_range_test_min_lr": {}, "lr_range_test_step_size": {}, )"
        R"("lr_range_test_step_rate": {}, "lr_range_test_staircase": {}}})",
        o_.min_lr, o_.step_size, o_.step_rate, o_.staircase);
  }

 private:
  RangeTestOptions o_;
};

class StableDecay final : public Schedule {
 public:
  explicit StableDecay(const StableDecayOptions& options) : o_(options) {
    require_finite_parameter("learning rate", o_.learning_rate);
    require_count("num_warmup_steps", o_.num_warmup_steps, 0);
    require_count("num_stable_steps", o_.num_stable_steps, 0);
    require_count("num_decay_steps", o_.num_decay_steps, 1);
    if (!(o_.min_lr_ratio >= 0 && o_.min_lr_ratio <= 1)) {
      throw InvalidArgument(
          fmt::format("min_lr_ratio is {}; it must be at least 0 and at most 1", o_.min_lr_ratio));
    }
  }
  double learning_rate(std::int64_t step) const override { return o_.learning_rate * factor(step - 1); }
  std::string describe() const override {
    return fmt::format(R"({{"type": "WSD", "lr": {}, "num_warmup_steps": {}, "num_stable_steps": {}, )"
                       R"("num_decay_steps": {}, "min_lr_ratio": {}, "decay_type": "{}"}})",
                       o_.learning_rate, o_.num_warmup_steps, o_.num_stable_steps, o_.num_decay_steps,
                       o_.min_lr_ratio, name_of(o_.decay_type));
  }

 private:
  double factor(std::int64_t iteration) const {
    const auto between = [&](double share) { return share * (1 - o_.min_lr_ratio) + o_.min_lr_ratio; };
    if (iteration < o_.num_warmup_steps) {
      return between(static_cast<double>(iteration) / static_cast<double>(o_.num_warmup_steps));
    }
    const std::int64_t decayed = iteration - o_.num_warmup_steps - o_.num_stable_steps;
    if (decayed < 0) return 1;
    if (decayed >= o_.num_decay_steps) return o_.min_lr_ratio;
    const double progress = static_cast<double>(decayed) / static_cast<double>(o_.num_decay_steps);
    switch (o_.decay_type) {
      case DecayType::linear:
        return between(1 - progress);
      case DecayType::one_minus_root:
        return between(1 - std::sqrt(progress));
      case DecayType::cosine:
        break;
    }
    return between(0.5 * (1 + std::cos(std::numbers::pi * progress)));
  }
  StableDecayOptions o_;
};

class InverseRoot final : public Schedule {
 public:
  explicit InverseRoot(const InverseRootOptions& options) : o_(options) {
    require_finite_parameter("learning rate", o_.learning_rate);
    require_count("num_warmup_steps", o_.num_warmup_steps, 0);
    if (o_.timescale) require_count("timescale", *o_.timescale, 1);
  }
  double learning_rate(std::int64_t step) const override {
    const std::int64_t iteration = step - 1;
    if (iteration < o_.num_warmup_steps) {
      return o_.learning_rate * (static_cast<double>(iteration) / static_cast<double>(o_.num_warmup_steps));
    }
    const auto scale = static_cast<double>(timescale());
    const auto shifted = static_cast<double>(iteration + timescale() - o_.num_warmup_steps);
    return o_.learning_rate * (1 / std::sqrt(shifted / scale));
  }
  std::string describe() const override {
    return fmt::format(
        R"({{"type": "InverseSquareRoot", "lr": {}, "num_warmup_steps": {}, "timescale": {}}})",
        o_.learning_rate, o_.num_warmup_steps, timescale());
  }

 private:
  std::int64_t timescale() const {
    return o_.timescale.value_or(o_.num_warmup_steps > 0 ? o_.num_warmup_steps : 10000);
  }
  InverseRootOptions o_;
};

}  // namespace

std::string_view name_of(DecayType type) {
  switch (type) {
    case DecayType::linear:
      return "linear";
    case DecayType::one_minus_root:
      return "1-sqrt";
    case DecayType::cosine:
      break;
  }
  return "cosine";
}

std::unique_ptr<Schedule> make_range_test_schedule(const RangeTestOptions& options) {
  return std::make_unique<RangeTest>(options);
}
std::unique_ptr<Schedule> make_stable_decay_schedule(const StableDecayOptions& options) {
  return std::make_unique<StableDecay>(options);
}
std::unique_ptr<Schedule> make_inverse_root_schedule(const InverseRootOptions& options) {
  return std::make_unique<InverseRoot>(options);
}

}  // namespace tranche
