#pragma once
/// Adam (Kingma and Ba, 2015), AdamW (Loshchilov and Hutter, 2019) and, with amsgrad, the variant of Reddi et
/// al. (2018). The formulas are beside AdamArguments; amsgrad replaces v by the greatest v so far, as in
/// PyTorch.

#include <cmath>

#include "tranche/kernels/optimizer_update.h"
#include "tranche/kernels/update_rule.h"

namespace tranche::rules::adam {

struct Adam {
  static constexpr std::string_view types[] = {"AdamW", "Adam"};
  static constexpr std::string_view kernel = "adam_update";
  static constexpr double learning_rate = 1e-3;
  static constexpr RuleOption options[] = {
      pair_option("betas", 0.9, 0.999, share_range, "decay of the moments"),
      number_option("eps", 1e-8, not_negative, "added to the root of the second moment"),
      number_option("weight_decay", 0, not_negative, "decoupled in AdamW, added to the gradient in Adam"),
      flag_option("adam_w_mode", true, "Adam with this is AdamW, as in DeepSpeed"),
      flag_option("amsgrad", false, "divides by the greatest second moment so far")};
  static constexpr RuleState states[] = {
      {"exp_avg"}, {"exp_avg_sq", true, true}, {"max_exp_avg_sq", true, true}};
  static constexpr unsigned slots[] = {0b011, 0b111};
  static constexpr double operations(unsigned kept) { return kept == 0b011 ? 16 : 17; }

  static bool decoupled(const RuleValues& values) {
    return values.type() == "AdamW" || values.flag("adam_w_mode");
  }
  static std::string_view name(const RuleValues& values) { return decoupled(values) ? "AdamW" : "Adam"; }
  static unsigned kept(const RuleValues& values) { return values.flag("amsgrad") ? 0b111 : 0b011; }

  using Arguments = kernels::AdamArguments;
  static Arguments arguments(const RuleValues& values, const UpdateFacts& facts) {
    // The kernel uses betas in fp32, and the corrections must use the same rounded betas. Otherwise the first
    // steps are off by their rounding (1 - 0.999 loses five digits).
    const auto beta1 = static_cast<float>(facts.momentum >= 0 ? facts.momentum : values.number("betas"));
    const auto beta2 = static_cast<float>(values.second("betas"));
    const auto t = static_cast<double>(facts.step);
    // The correction is computed in double and rounded once, because 1 - beta^t loses most of fp32's digits
    // for small t.
    const double correction = std::sqrt(1 - std::pow(double{beta2}, t));
    Arguments a;
    a.learning_rate = static_cast<float>(facts.learning_rate);
    a.beta1 = beta1;
    a.beta2 = beta2;
    a.weight_decay = static_cast<float>(values.number("weight_decay"));
    a.step_size = static_cast<float>(facts.learning_rate * correction / (1 - std::pow(double{beta1}, t)));
    a.corrected_epsilon = static_cast<float>(values.number("eps") * correction);
    a.gradient_scale = facts.gradient_scale;
    a.decoupled = decoupled(values);
    a.apply = facts.apply;
    return a;
  }

  template <unsigned kept>
  static constexpr void element(const Arguments& a, float g, float& w, float (&states)[3]) {
    float &m = states[0], &v = states[1], &greatest = states[2];
    g = g * a.gradient_scale;
    if (a.decoupled) {
      w = w - (a.learning_rate * a.weight_decay) * w;
    } else {
      g = g + a.weight_decay * w;
    }
    m = a.beta1 * m + (1.0f - a.beta1) * g;
    v = a.beta2 * v + ((1.0f - a.beta2) * g) * g;
    float under = v;
    if constexpr (kept == 0b111) under = greatest = larger(greatest, v);
    w = w - a.step_size * (m / (square_root(under) + a.corrected_epsilon));
  }
};

using Rules = std::tuple<Adam>;

}  // namespace tranche::rules::adam
