#pragma once
/// Learning-rate schedules with DeepSpeed's names and arithmetic, as pure functions of the number of the
/// update.
///
/// DeepSpeed counts an iteration from 0; update number `step` (1 is the first) uses iteration step - 1. All
/// arithmetic is in double, in the order in which DeepSpeed (deepspeed/runtime/lr_schedules.py) writes it.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace tranche {

class Schedule {
 public:
  virtual ~Schedule() = default;
  /// Learning rate of update number `step` (1 is the first).
  virtual double learning_rate(std::int64_t step) const = 0;
  /// The momentum (beta1) for schedules that cycle it; negative: the optimizer's own applies.
  virtual double momentum(std::int64_t) const { return -1; }
  /// Name and parameters as JSON text.
  virtual std::string describe() const = 0;
};

std::unique_ptr<Schedule> make_constant_schedule(double learning_rate);

/// The shape of the rise: `logarithmic` follows log(iteration + 1) / log(steps), `linear` iteration / steps.
enum class WarmupType : std::uint8_t { logarithmic, linear };

/// Rises from the minimum to the maximum over warmup_num_steps updates, then stays. Fewer than 2 steps count
/// as 2.
struct WarmupOptions {
  double warmup_min_lr = 0;
  double warmup_max_lr = 0.001;
  std::int64_t warmup_num_steps = 1000;
  WarmupType warmup_type = WarmupType::logarithmic;
};
/// Throws InvalidArgument on a step count below 1 or rates that are not finite; so do the other factories.
std::unique_ptr<Schedule> make_warmup_schedule(const WarmupOptions& options);

/// WarmupLR, then a straight line from warmup_max_lr down to warmup_min_lr at total_num_steps, where it
/// stays, as in DeepSpeed.
struct WarmupDecayOptions {
  WarmupOptions warmup;
  std::int64_t total_num_steps = 0;
};
std::unique_ptr<Schedule> make_warmup_decay_schedule(const WarmupDecayOptions& options);

/// Multiples of `learning_rate`: a rise from warmup_min_ratio to 1, then half a cosine down to cos_min_ratio,
/// where it stays after total_num_steps.
struct WarmupCosineOptions {
  double learning_rate = 0.001;
  std::int64_t total_num_steps = 0;
  double warmup_min_ratio = 0;
  std::int64_t warmup_num_steps = 1000;
  double cos_min_ratio = 0.0001;
  WarmupType warmup_type = WarmupType::logarithmic;
};
std::unique_ptr<Schedule> make_warmup_cosine_schedule(const WarmupCosineOptions& options);

/// One cycle (Smith, 2018): the rate rises over the first part and falls over the second, while momentum does
/// the opposite. After the cycle the rate is divided by 1 + decay_lr_rate * k and momentum multiplied by 1 +
/// decay_mom_rate * k, with k the updates since then over decay_step_size. A stair count above 0 divides a
/// part of the cycle into that many equal steps.
struct OneCycleOptions {
  double cycle_min_lr = 0;
  double cycle_max_lr = 0;
  double decay_lr_rate = 0;
  std::int64_t cycle_first_step_size = 2000;
  std::optional<std::int64_t> cycle_second_step_size;  ///< the first's when not set
  std::int64_t cycle_first_stair_count = 0;
  std::optional<std::int64_t> cycle_second_stair_count;  ///< the first's when not set
  std::int64_t decay_step_size = 0;                      ///< updates per interval; 0: no decay
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8;
  double cycle_max_mom = 0.9;
  double decay_mom_rate = 0;
};
std::unique_ptr<Schedule> make_one_cycle_schedule(const OneCycleOptions& options);

/// DeepSpeed's LRRangeTest: the rate grows by step_rate times min_lr over every step_size updates, evenly or,
/// with `staircase`, at the end of each interval. One run shows the rates at which the loss falls and those
/// at which it rises.
struct RangeTestOptions {
  double min_lr = 0.001;
  std::int64_t step_size = 2000;
  double step_rate = 1;
  bool staircase = false;
};
std::unique_ptr<Schedule> make_range_test_schedule(const RangeTestOptions& options);

/// Warm-up, stable, decay (Hu et al., 2024), with the keys and arithmetic of transformers'
/// get_wsd_schedule: a line from min_lr_ratio to 1, 1, and down to min_lr_ratio, where it stays.
enum class DecayType : std::uint8_t { cosine, linear, one_minus_root };
std::string_view name_of(DecayType type);
struct StableDecayOptions {
  double learning_rate = 0.001;
  std::int64_t num_warmup_steps = 0;
  std::int64_t num_stable_steps = 0;
  std::int64_t num_decay_steps = 0;
  double min_lr_ratio = 0;
  DecayType decay_type = DecayType::cosine;
};
std::unique_ptr<Schedule> make_stable_decay_schedule(const StableDecayOptions& options);

/// transformers' get_inverse_sqrt_schedule: a line from 0 over num_warmup_steps updates, then 1 / sqrt((i +
/// timescale - num_warmup_steps) / timescale) of the rate in iteration i.
struct InverseRootOptions {
  double learning_rate = 0.001;
  std::int64_t num_warmup_steps = 0;
  std::optional<std::int64_t> timescale = {};  ///< num_warmup_steps when not set, 10000 where that is 0
};
std::unique_ptr<Schedule> make_inverse_root_schedule(const InverseRootOptions& options);

}  // namespace tranche
