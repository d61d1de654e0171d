#pragma once
/// Dynamic loss scaling as an explicit state machine (Micikevicius et al., 2018, section 3.2).

#include <cstdint>

namespace tranche {

struct LossScalerOptions {
  bool dynamic = true;
  double initial_scale = 65536;  ///< 2^16; the fixed scale when not dynamic
  std::int64_t window = 1000;    ///< clean steps after which the scale doubles
  int hysteresis = 2;  ///< the scale halves at the hysteresis-th overflow and each later one until refilled
  bool consecutive_hysteresis = false;  ///< refill hysteresis at every clean step
  double minimum_scale = 1;             ///< 0: as low as fp32 allows (2^-80)
};

/// The state that must be saved to continue.
struct LossScalerState {
  double scale = 1;
  std::int64_t clean_steps = 0;
  int hysteresis_left = 2;
  friend bool operator==(const LossScalerState&, const LossScalerState&) = default;
};

class LossScaler {
 public:
  /// Throws InvalidArgument on invalid scales, windows or hysteresis.
  explicit LossScaler(const LossScalerOptions& options);
  double scale() const noexcept { return state_.scale; }
  /// Records the outcome of a step. Throws NumericalError when an overflow occurs at the minimum scale.
  void update(bool overflow);
  const LossScalerState& state() const noexcept { return state_; }
  /// Continues from a saved state; its counts are clamped to the present window and hysteresis, and a fixed
  /// scale replaces the saved one. Throws InvalidArgument.
  void restore(const LossScalerState& state);
  const LossScalerOptions& options() const noexcept { return options_; }

 private:
  LossScalerOptions options_;
  LossScalerState state_;
};

}  // namespace tranche
