#pragma once
/// Lion (Chen et al., 2023), with DeepSpeed's keys. It has one state, and every element moves by the rate.
/// With g = gradient * gradient_scale: w = w - (rate * weight_decay) * w; w = w - rate * sign(beta1 m + (1 -
/// beta1) g); m = beta2 m + (1 - beta2) g.

#include "tranche/kernels/update_rule.h"

namespace tranche::rules::lion {

struct Lion {
  static constexpr std::string_view types[] = {"Lion"};
  static constexpr std::string_view kernel = "lion_update";
  static constexpr double learning_rate = 1e-3;
  static constexpr RuleOption options[] = {
      pair_option("betas", 0.9, 0.99, share_range, "share of the past in the direction, and in what is kept"),
      number_option("weight_decay", 0, not_negative, "decoupled")};
  static constexpr RuleState states[] = {{"exp_avg"}};
  static constexpr unsigned slots[] = {0b1};
  static constexpr double operations(unsigned) { return 12; }
  static unsigned kept(const RuleValues&) { return 0b1; }

  struct Arguments {
    float learning_rate, beta1, beta2, weight_decay, gradient_scale;
    bool apply;
  };
  static Arguments arguments(const RuleValues& values, const UpdateFacts& facts) {
    Arguments a{};
    a.learning_rate = static_cast<float>(facts.learning_rate);
    a.beta1 = static_cast<float>(facts.momentum >= 0 ? facts.momentum : values.number("betas"));
    a.beta2 = static_cast<float>(values.second("betas"));
    a.weight_decay = static_cast<float>(values.number("weight_decay"));
    a.gradient_scale = facts.gradient_scale;
    a.apply = facts.apply;
    return a;
  }

  template <unsigned kept>
  static constexpr void element(const Arguments& a, float g, float& w, float (&states)[1]) {
    float& m = states[0];
    g = g * a.gradient_scale;
    w = w - (a.learning_rate * a.weight_decay) * w;
    w = w - a.learning_rate * sign_of(a.beta1 * m + (1.0f - a.beta1) * g);
    m = a.beta2 * m + (1.0f - a.beta2) * g;
  }
};

using Rules = std::tuple<Lion>;

}  // namespace tranche::rules::lion
