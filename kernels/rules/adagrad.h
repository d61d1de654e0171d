#pragma once
/// Adagrad (Duchi, Hazan and Singer, 2011), with PyTorch's keys and defaults. With g = gradient *
/// gradient_scale + weight_decay * w: sum = sum + g g; w = w - rate_t * (g / (sqrt(sum) + eps)), where rate_t
/// = rate / (1 + (t - 1) lr_decay).

#include "tranche/kernels/update_rule.h"

namespace tranche::rules::adagrad {

struct Adagrad {
  static constexpr std::string_view types[] = {"Adagrad"};
  static constexpr std::string_view kernel = "adagrad_update";
  static constexpr double learning_rate = 1e-2;
  static constexpr RuleOption options[] = {
      number_option("lr_decay", 0, not_negative, "the rate is divided by 1 + (update - 1) * lr_decay"),
      number_option("eps", 1e-10, not_negative, "added to the root of the sum"),
      number_option("weight_decay", 0, not_negative, "added to the gradient"),
      number_option("initial_accumulator_value", 0, not_negative, "the sum begins at it")};
  /// The sum grows, so bf16 would lose small squares.
  static constexpr RuleState states[] = {{"sum", false, true}};
  static constexpr unsigned slots[] = {0b1};
  static constexpr double operations(unsigned) { return 10; }
  static unsigned kept(const RuleValues&) { return 0b1; }
  static float initial_value(const RuleValues& values, int) {
    return static_cast<float>(values.number("initial_accumulator_value"));
  }

  struct Arguments {
    float step_size, epsilon, weight_decay, gradient_scale;
    bool apply;
  };
  static Arguments arguments(const RuleValues& values, const UpdateFacts& facts) {
    Arguments a{};
    const auto before = static_cast<double>(facts.step - 1);
    a.step_size = static_cast<float>(facts.learning_rate / (1 + before * values.number("lr_decay")));
    a.epsilon = static_cast<float>(values.number("eps"));
    a.weight_decay = static_cast<float>(values.number("weight_decay"));
    a.gradient_scale = facts.gradient_scale;
    a.apply = facts.apply;
    return a;
  }

  template <unsigned kept>
  static constexpr void element(const Arguments& a, float g, float& w, float (&states)[1]) {
    float& sum = states[0];
    g = g * a.gradient_scale + a.weight_decay * w;
    sum = sum + g * g;
    w = w - a.step_size * (g / (square_root(sum) + a.epsilon));
  }
};

using Rules = std::tuple<Adagrad>;

}  // namespace tranche::rules::adagrad
