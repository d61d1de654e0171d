#pragma once
/// LARS (You, Gitman and Ginsburg, 2017), with optax's keys, defaults and order. With u = gradient *
/// gradient_scale + weight_decay * w and ratio = trust_coefficient * |w| / (|u| + eps), 1 where a norm is 0:
/// b = momentum b + (rate * ratio) u; w = w - b, or w = w - (momentum b + (rate * ratio) u) with nesterov.

#include "tranche/kernels/update_rule.h"

namespace tranche::rules::lars {

struct Lars {
  static constexpr std::string_view types[] = {"LARS"};
  static constexpr std::string_view kernel = "lars_update";
  static constexpr double learning_rate = 1e-3;
  static constexpr RuleOption options[] = {
      number_option("momentum", 0.9, not_negative, "share of the last step in the next; 0 keeps no state"),
      number_option("weight_decay", 0, not_negative, "added to the gradient"),
      number_option("trust_coefficient", 0.001, not_negative, "multiplies the trust ratio"),
      number_option("eps", 0, not_negative, "added to the direction's norm"),
      flag_option("nesterov", false, "Nesterov's form of momentum")};
  static constexpr RuleState states[] = {{"momentum_buffer"}};
  static constexpr unsigned slots[] = {0b0, 0b1};
  static constexpr double operations(unsigned kept) { return kept == 0 ? 14 : 16; }
  static unsigned kept(const RuleValues& values) { return values.number("momentum") == 0 ? 0b0 : 0b1; }

  struct Arguments {
    double trust_coefficient, epsilon;
    float learning_rate, weight_decay, momentum, gradient_scale;
    bool nesterov, apply;
  };
  static Arguments arguments(const RuleValues& values, const UpdateFacts& facts) {
    Arguments a{};
    a.trust_coefficient = values.number("trust_coefficient");
    a.epsilon = values.number("eps");
    a.learning_rate = static_cast<float>(facts.learning_rate);
    a.weight_decay = static_cast<float>(values.number("weight_decay"));
    a.momentum = static_cast<float>(values.number("momentum"));
    a.gradient_scale = facts.gradient_scale;
    a.nesterov = values.flag("nesterov");
    a.apply = facts.apply;
    return a;
  }

  static constexpr bool states_first = false;
  template <unsigned kept>
  static constexpr float direction(const Arguments& a, float g, float w, const float (&)[1]) {
    return g * a.gradient_scale + a.weight_decay * w;
  }
  static constexpr float ratio(const Arguments& a, double weight_norm, double direction_norm) {
    if (weight_norm == 0 || direction_norm == 0) return 1;
    return static_cast<float>(a.trust_coefficient * weight_norm / (direction_norm + a.epsilon));
  }
  template <unsigned kept>
  static constexpr void finish(const Arguments& a, float ratio, float direction, float& w,
                               float (&states)[1]) {
    float step = (a.learning_rate * ratio) * direction;
    if constexpr (kept == 0b1) {
      float& buffer = states[0];
      buffer = a.momentum * buffer + step;
      step = a.nesterov ? a.momentum * buffer + step : buffer;
    }
    w = w - step;
  }
};

using Rules = std::tuple<Lars>;

}  // namespace tranche::rules::lars
