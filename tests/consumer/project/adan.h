#pragma once
// Adan (Xie et al., 2022) as a program's own optimizer; CMakeLists.txt names this file, the configuration
// names "Adan". m, d and v are means of the gradient, of its differences, and of the square of g + beta2 (g -
// before).
#include <tranche/kernels/update_rule.h>

#include <cmath>

namespace tranche::rules::adan {

struct Adan {
  static constexpr std::string_view types[] = {"Adan"};
  static constexpr std::string_view kernel = "adan_update";
  static constexpr double learning_rate = 1e-3;
  static constexpr RuleOption options[] = {
      pair_option("betas", 0.98, 0.92, share_range, "decay of the mean gradient and of the mean difference"),
      number_option("beta3", 0.99, share_range, "decay of the mean square"),
      number_option("eps", 1e-8, not_negative, "added to the root of the mean square"),
      number_option("weight_decay", 0, not_negative, "divides the new weight by 1 + lr times it")};
  static constexpr RuleState states[] = {
      {"exp_avg"}, {"exp_avg_diff"}, {"exp_avg_sq", true, true}, {"previous"}};
  static constexpr unsigned slots[] = {0b1111};
  static constexpr double operations(unsigned) { return 27; }
  static unsigned kept(const RuleValues&) { return 0b1111; }

  struct Arguments {
    float beta1, beta2, beta3, step_size, difference_size, root, epsilon, shrink, gradient_scale;
    bool first, apply;
  };
  static Arguments arguments(const RuleValues& values, const UpdateFacts& facts) {
    Arguments a{};
    a.beta1 = static_cast<float>(values.number("betas"));
    a.beta2 = static_cast<float>(values.second("betas"));
    a.beta3 = static_cast<float>(values.number("beta3"));
    const auto t = static_cast<double>(facts.step);
    const double rate = facts.learning_rate;
    a.step_size = static_cast<float>(rate / (1 - std::pow(double{a.beta1}, t)));
    a.difference_size = static_cast<float>(rate * double{a.beta2} / (1 - std::pow(double{a.beta2}, t)));
    a.root = static_cast<float>(1 / std::sqrt(1 - std::pow(double{a.beta3}, t)));
    a.epsilon = static_cast<float>(values.number("eps"));
    a.shrink = static_cast<float>(1 / (1 + rate * values.number("weight_decay")));
    a.gradient_scale = facts.gradient_scale;
    a.first = facts.step <= 1;
    a.apply = facts.apply;
    return a;
  }

  template <unsigned kept>
  static constexpr void element(const Arguments& a, float g, float& w, float (&states)[4]) {
    float &m = states[0], &d = states[1], &v = states[2], &previous = states[3];
    g = g * a.gradient_scale;
    const float difference = a.first ? 0.0f : g - previous;
    const float ahead = g + a.beta2 * difference;
    m = a.beta1 * m + (1.0f - a.beta1) * g;
    d = a.beta2 * d + (1.0f - a.beta2) * difference;
    v = a.beta3 * v + ((1.0f - a.beta3) * ahead) * ahead;
    previous = g;
    w = (w - (a.step_size * m + a.difference_size * d) / (square_root(v) * a.root + a.epsilon)) * a.shrink;
  }
};

using Rules = std::tuple<Adan>;

}  // namespace tranche::rules::adan
