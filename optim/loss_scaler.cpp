#include "tranche/optim/loss_scaler.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "tranche/core/error.h"

namespace tranche {
namespace {

/// Halving and doubling stop at these limits: the scale, its inverse and their products with a token count's
/// power of two stay normal numbers in fp32.
constexpr double largest_scale = 0x1p80;
constexpr double smallest_scale = 0x1p-80;

void check_scale(double scale, const char* what) {
  if (!std::isfinite(scale) || scale <= 0) {
    throw InvalidArgument(
        fmt::format("{} of the loss scaler is {}; it must be finite and above 0", what, scale));
  }
}

}  // namespace

LossScaler::LossScaler(const LossScalerOptions& options) : options_(options) {
  check_scale(options.initial_scale, "initial scale");
  if (options.dynamic) {
    if (options.minimum_scale != 0) check_scale(options.minimum_scale, "minimum scale");
    if (options.minimum_scale > options.initial_scale) {
      throw InvalidArgument(fmt::format("the loss scaler's minimum scale {} is above its initial scale {}",
                                        options.minimum_scale, options.initial_scale));
    }
    if (options.window < 1 || options.hysteresis < 1) {
      throw InvalidArgument(fmt::format("window {} and hysteresis {} of the loss scaler must be at least 1",
                                        options.window, options.hysteresis));
    }
  }
  state_.scale = options.initial_scale;
  state_.hysteresis_left = options.hysteresis;
}

void LossScaler::update(bool overflow) {
  if (!options_.dynamic) return;
  if (overflow) {
    state_.clean_steps = 0;
    if (state_.hysteresis_left > 1) {
      --state_.hysteresis_left;
      return;
    }
    const double minimum = std::max(options_.minimum_scale, smallest_scale);
    if (state_.scale <= minimum) {
      throw NumericalError(fmt::format(
          "gradients overflow at a loss scale of {}, the minimum (fp16.min_loss_scale): the model's "
          "gradients "
          "are not finite at any scale. Lower the learning rate, clip gradients, or train in bf16",
          state_.scale));
    }
    state_.scale = std::max(state_.scale / 2, minimum);
    return;
  }
  if (options_.consecutive_hysteresis) state_.hysteresis_left = options_.hysteresis;
  if (++state_.clean_steps == options_.window) {
    state_.clean_steps = 0;
    state_.hysteresis_left = options_.hysteresis;
    if (state_.scale < largest_scale) state_.scale *= 2;
  }
}

void LossScaler::restore(const LossScalerState& state) {
  check_scale(state.scale, "restored scale");
  if (state.clean_steps < 0 || state.hysteresis_left < 1) {
    throw InvalidArgument(
        fmt::format("loss scaler state with {} clean steps and hysteresis {} cannot be restored",
                    state.clean_steps, state.hysteresis_left));
  }
  state_ = state;
  // The present configuration applies: a smaller window or hysteresis than the saved run's takes effect now.
  state_.clean_steps = std::min(state_.clean_steps, options_.window - 1);
  state_.hysteresis_left = std::min(state_.hysteresis_left, options_.hysteresis);
  if (!options_.dynamic) state_.scale = options_.initial_scale;
}

}  // namespace tranche
