#pragma once
/// LAMB (You et al., 2020), with DeepSpeed's keys and optax's arithmetic. With g = gradient * gradient_scale,
/// m and v Adam's: u = m^ / (sqrt(v^) + eps) + weight_decay * w, where ^ is Adam's bias correction; ratio =
/// |w| / |u|, 1 where a norm is 0, clamped to min_coeff and max_coeff if they are given; w = w - (rate *
/// ratio) * u.

#include <cmath>

#include "tranche/core/error.h"
#include "tranche/kernels/update_rule.h"

namespace tranche::rules::lamb {

struct Lamb {
  static constexpr std::string_view types[] = {"Lamb"};
  static constexpr std::string_view kernel = "lamb_update";
  static constexpr double learning_rate = 1e-3;
  static constexpr RuleOption options[] = {
      pair_option("betas", 0.9, 0.999, share_range, "decay of the moments"),
      number_option("eps", 1e-8, not_negative, "added to the root of the second moment"),
      number_option("weight_decay", 0, not_negative, "part of the direction whose norm counts"),
      number_option("max_coeff", no_bound, not_negative, "largest trust ratio (DeepSpeed: 10)"),
      number_option("min_coeff", no_bound, not_negative, "least trust ratio (DeepSpeed: 0.01)")};
  static constexpr RuleState states[] = {{"exp_avg"}, {"exp_avg_sq", true, true}};
  static constexpr unsigned slots[] = {0b11};
  static constexpr double operations(unsigned) { return 26; }
  static unsigned kept(const RuleValues&) { return 0b11; }
  static void check(const RuleValues& values) {
    const double least = values.number("min_coeff"), most = values.number("max_coeff");
    if (std::isfinite(least) && least > most) {
      throw InvalidArgument("Lamb: min_coeff is " + values.text("min_coeff") + ", above max_coeff, " +
                            values.text("max_coeff"));
    }
  }

  struct Arguments {
    double least, most;
    float learning_rate, beta1, beta2, weight_decay, correction, corrected_epsilon, gradient_scale;
    bool apply;
  };
  static Arguments arguments(const RuleValues& values, const UpdateFacts& facts) {
    // Like in adam.h, the corrections use the rounded betas, in double.
    const auto beta1 = static_cast<float>(facts.momentum >= 0 ? facts.momentum : values.number("betas"));
    const auto beta2 = static_cast<float>(values.second("betas"));
    const auto t = static_cast<double>(facts.step);
    const double root = std::sqrt(1 - std::pow(double{beta2}, t));
    Arguments a{};
    a.least = std::isfinite(values.number("min_coeff")) ? values.number("min_coeff") : 0;
    a.most = values.number("max_coeff");
    a.learning_rate = static_cast<float>(facts.learning_rate);
    a.beta1 = beta1;
    a.beta2 = beta2;
    a.weight_decay = static_cast<float>(values.number("weight_decay"));
    a.correction = static_cast<float>(root / (1 - std::pow(double{beta1}, t)));
    a.corrected_epsilon = static_cast<float>(values.number("eps") * root);
    a.gradient_scale = facts.gradient_scale;
    a.apply = facts.apply;
    return a;
  }

  static constexpr bool states_first = true;
  template <unsigned kept>
  static constexpr void advance(const Arguments& a, float g, float, float (&states)[2]) {
    float &m = states[0], &v = states[1];
    g = g * a.gradient_scale;
    m = a.beta1 * m + (1.0f - a.beta1) * g;
    v = a.beta2 * v + ((1.0f - a.beta2) * g) * g;
  }
  template <unsigned kept>
  static constexpr float direction(const Arguments& a, float, float w, const float (&states)[2]) {
    const float scaled = states[0] / (square_root(states[1]) + a.corrected_epsilon);
    return a.correction * scaled + a.weight_decay * w;
  }
  static constexpr float ratio(const Arguments& a, double weight_norm, double direction_norm) {
    if (weight_norm == 0 || direction_norm == 0) return 1;
    const double ratio = weight_norm / direction_norm;
    return static_cast<float>(ratio > a.most ? a.most : (ratio < a.least ? a.least : ratio));
  }
  template <unsigned kept>
  static constexpr void finish(const Arguments& a, float ratio, float direction, float& w, float (&)[2]) {
    w = w - (a.learning_rate * ratio) * direction;
  }
};

using Rules = std::tuple<Lamb>;

}  // namespace tranche::rules::lamb
