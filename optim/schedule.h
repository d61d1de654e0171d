#pragma once
/// Learning-rate schedules with DeepSpeed's names and arithmetic, as pure functions of the step.

#include <cstdint>
#include <memory>
#include <string>

namespace tranche {

class Schedule {
 public:
  virtual ~Schedule() = default;
  /// Learning rate of update number `step` (1 is the first).
  virtual double learning_rate(std::int64_t step) const = 0;
  /// Momentum (beta1) for schedules that cycle it; negative: leave the optimizer's.
  virtual double momentum(std::int64_t) const { return -1; }
  virtual std::string describe() const = 0;
};

std::unique_ptr<Schedule> make_constant_schedule(double learning_rate);

}  // namespace tranche
