#include "tranche/optim/schedule.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tranche/core/error.h"

namespace tranche {
namespace {

void require_finite(const char* name, double value) {
  if (!std::isfinite(value))
    throw InvalidArgument(fmt::format("{} is {}; it must be a finite number", name, value));
}
void require_positive(const char* name, std::int64_t value) {
  if (value < 1) throw InvalidArgument(fmt::format("{} is {}; it must be at least 1", name, value));
}
const char* name_of(WarmupType type) {
  return type == WarmupType::linear ? "linear" : "log";
}

/// The fraction of the rise that iteration `iteration` (below `steps`) has reached.
class Rise {
 public:
  Rise(std::int64_t steps, WarmupType type)
      : steps_(std::max<std::int64_t>(2, steps)),
        inverse_log_(1.0 / std::log(static_cast<double>(steps_))),
        type_(type) {}
  bool rising(std::int64_t iteration) const { return iteration < steps_; }
  std::int64_t steps() const { return steps_; }
  double share(std::int64_t iteration) const {
    if (type_ == WarmupType::linear) return static_cast<double>(iteration) / static_cast<double>(steps_);
    return inverse_log_ * std::log(static_cast<double>(iteration + 1));
  }

 private:
  std::int64_t steps_;
  double inverse_log_;
  WarmupType type_;
};

class Constant final : public Schedule {
 public:
  explicit Constant(double rate) : rate_(rate) { require_finite("learning rate", rate); }
  double learning_rate(std::int64_t) const override { return rate_; }
  std::string describe() const override { return fmt::format(R"({{"type": "constant", "lr": {}}})", rate_); }

 private:
  double rate_;
};

void check(const WarmupOptions& options) {
  require_finite("warmup_min_lr", options.warmup_min_lr);
  require_finite("warmup_max_lr", options.warmup_max_lr);
  require_positive("warmup_num_steps", options.warmup_num_steps);
}

std::string parameters(const WarmupOptions& options) {
  return fmt::format(
      R"("warmup_min_lr": {}, "warmup_max_lr": {}, "warmup_num_steps": {}, "warmup_type": "{}")",
      options.warmup_min_lr, options.warmup_max_lr, options.warmup_num_steps, name_of(options.warmup_type));
}

class Warmup final : public Schedule {
 public:
  explicit Warmup(const WarmupOptions& options)
      : options_(options), rise_(options.warmup_num_steps, options.warmup_type) {
    check(options);
  }
  double learning_rate(std::int64_t step) const override {
    const std::int64_t iteration = step - 1;
    const double share = rise_.rising(iteration) ? rise_.share(iteration) : 1.0;
    return options_.warmup_min_lr + (options_.warmup_max_lr - options_.warmup_min_lr) * share;
  }
  std::string describe() const override {
    return fmt::format(R"({{"type": "WarmupLR", {}}})", parameters(options_));
  }

 private:
  WarmupOptions options_;
  Rise rise_;
};

class WarmupDecay final : public Schedule {
 public:
  explicit WarmupDecay(const WarmupDecayOptions& options)
      : options_(options), rise_(options.warmup.warmup_num_steps, options.warmup.warmup_type) {
    check(options.warmup);
    require_positive("total_num_steps", options.total_num_steps);
  }
  double learning_rate(std::int64_t step) const override {
    const std::int64_t iteration = step - 1;
    const auto left = static_cast<double>(options_.total_num_steps - iteration);
    const auto length =
        static_cast<double>(std::max<std::int64_t>(1, options_.total_num_steps - rise_.steps()));
    const double share = rise_.rising(iteration) ? rise_.share(iteration) : std::max(0.0, left / length);
    const WarmupOptions& rates = options_.warmup;
    return rates.warmup_min_lr + (rates.warmup_max_lr - rates.warmup_min_lr) * share;
  }
  std::string describe() const override {
    return fmt::format(R"({{"type": "WarmupDecayLR", "total_num_steps": {}, {}}})", options_.total_num_steps,
                       parameters(options_.warmup));
  }

 private:
  WarmupDecayOptions options_;
  Rise rise_;
};

class WarmupCosine final : public Schedule {
 public:
  explicit WarmupCosine(const WarmupCosineOptions& options)
      : options_(options), rise_(options.warmup_num_steps, options.warmup_type) {
    require_finite("learning rate", options.learning_rate);
    require_finite("warmup_min_ratio", options.warmup_min_ratio);
    require_finite("cos_min_ratio", options.cos_min_ratio);
    require_positive("warmup_num_steps", options.warmup_num_steps);
    require_positive("total_num_steps", options.total_num_steps);
  }
  double learning_rate(std::int64_t step) const override { return options_.learning_rate * ratio(step - 1); }
  std::string describe() const override {
    return fmt::format(
        R"({{"type": "WarmupCosineLR", "lr": {}, "total_num_steps": {}, "warmup_min_ratio": {}, )"
        R"("warmup_num_steps": {}, "cos_min_ratio": {}, "warmup_type": "{}"}})",
        options_.learning_rate, options_.total_num_steps, options_.warmup_min_ratio,
        options_.warmup_num_steps, options_.cos_min_ratio, name_of(options_.warmup_type));
  }

 private:
  double ratio(std::int64_t iteration) const {
    if (rise_.rising(iteration)) {
      return options_.warmup_min_ratio + rise_.share(iteration) * (1.0 - options_.warmup_min_ratio);
    }
    // The first update of the decay has already moved by one step, because DeepSpeed counts it from 1.
    const auto done = static_cast<double>(iteration - rise_.steps() + 1);
    const auto length =
        static_cast<double>(std::max<std::int64_t>(1, options_.total_num_steps - rise_.steps()));
    const double progress = std::min(1.0, done / length);
    const double cosine = (1 + std::cos(std::numbers::pi * progress)) / 2;
    return std::max(0.0, options_.cos_min_ratio + (1.0 - options_.cos_min_ratio) * cosine);
  }
  WarmupCosineOptions options_;
  Rise rise_;
};

}  // namespace

std::unique_ptr<Schedule> make_constant_schedule(double learning_rate) {
  return std::make_unique<Constant>(learning_rate);
}
std::unique_ptr<Schedule> make_warmup_schedule(const WarmupOptions& options) {
  return std::make_unique<Warmup>(options);
}
std::unique_ptr<Schedule> make_warmup_decay_schedule(const WarmupDecayOptions& options) {
  return std::make_unique<WarmupDecay>(options);
}
std::unique_ptr<Schedule> make_warmup_cosine_schedule(const WarmupCosineOptions& options) {
  return std::make_unique<WarmupCosine>(options);
}

}  // namespace tranche
