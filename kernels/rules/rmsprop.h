#pragma once
/// RMSprop (Hinton, 2012), with PyTorch's keys and defaults. With g = gradient * gradient_scale +
/// weight_decay * w: v = alpha v + (1 - alpha) g g; centered: a = alpha a + (1 - alpha) g and v - a a
/// replaces v; d = g / (sqrt(v) + eps); b = momentum b + d; w = w - rate * b (d without momentum).

#include "tranche/kernels/update_rule.h"

namespace tranche::rules::rmsprop {

struct RmsProp {
  static constexpr std::string_view types[] = {"RMSprop"};
  static constexpr std::string_view kernel = "rmsprop_update";
  static constexpr double learning_rate = 1e-2;
  static constexpr RuleOption options[] = {
      number_option("alpha", 0.99, share_range, "decay of the mean square"),
      number_option("eps", 1e-8, not_negative, "added to the root of the mean square"),
      number_option("weight_decay", 0, not_negative, "added to the gradient"),
      number_option("momentum", 0, not_negative,
                    "share of the last direction in the next; 0 keeps no buffer"),
      flag_option("centered", false, "divides by the root of the variance")};
  static constexpr RuleState states[] = {{"square_avg", true, true}, {"grad_avg"}, {"momentum_buffer"}};
  static constexpr unsigned slots[] = {0b001, 0b011, 0b101, 0b111};
  static constexpr double operations(unsigned kept) {
    return 10 + ((kept & 0b010) != 0 ? 5 : 0) + ((kept & 0b100) != 0 ? 2 : 0);
  }
  static unsigned kept(const RuleValues& values) {
    return 0b001u | (values.flag("centered") ? 0b010u : 0u) | (values.number("momentum") > 0 ? 0b100u : 0u);
  }

  struct Arguments {
    float learning_rate, alpha, epsilon, weight_decay, momentum, gradient_scale;
    bool apply;
  };
  static Arguments arguments(const RuleValues& values, const UpdateFacts& facts) {
    Arguments a{};
    a.learning_rate = static_cast<float>(facts.learning_rate);
    a.alpha = static_cast<float>(values.number("alpha"));
    a.epsilon = static_cast<float>(values.number("eps"));
    a.weight_decay = static_cast<float>(values.number("weight_decay"));
    a.momentum = static_cast<float>(values.number("momentum"));
    a.gradient_scale = facts.gradient_scale;
    a.apply = facts.apply;
    return a;
  }

  template <unsigned kept>
  static constexpr void element(const Arguments& a, float g, float& w, float (&states)[3]) {
    float &square = states[0], &mean = states[1], &buffer = states[2];
    g = g * a.gradient_scale + a.weight_decay * w;
    square = a.alpha * square + ((1.0f - a.alpha) * g) * g;
    float under = square;
    if constexpr ((kept & 0b010) != 0) {
      mean = a.alpha * mean + (1.0f - a.alpha) * g;
      under = larger(square - mean * mean, 0.0f);  // rounding may make it negative
    }
    float direction = g / (square_root(under) + a.epsilon);
    if constexpr ((kept & 0b100) != 0) direction = buffer = a.momentum * buffer + direction;
    w = w - a.learning_rate * direction;
  }
};

using Rules = std::tuple<RmsProp>;

}  // namespace tranche::rules::rmsprop
