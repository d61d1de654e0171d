#pragma once
/// Stochastic gradient descent with momentum as PyTorch defines it; the formulas are beside SgdArguments.

#include "tranche/core/error.h"
#include "tranche/kernels/optimizer_update.h"
#include "tranche/kernels/update_rule.h"

namespace tranche::rules::sgd {

struct Sgd {
  static constexpr std::string_view types[] = {"SGD"};
  static constexpr std::string_view kernel = "sgd_update";
  static constexpr double learning_rate = 1e-3;
  static constexpr RuleOption options[] = {
      number_option("momentum", 0, not_negative, "share of the last direction in the next; 0 keeps no state"),
      number_option("dampening", 0, any_finite, "1 minus the gradient's share in the momentum"),
      number_option("weight_decay", 0, not_negative, "added to the gradient"),
      flag_option("nesterov", false, "Nesterov's form of momentum")};
  static constexpr RuleState states[] = {{"momentum_buffer"}};
  static constexpr unsigned slots[] = {0b0, 0b1};
  static constexpr double operations(unsigned kept) { return kept == 0 ? 5 : 8; }

  static unsigned kept(const RuleValues& values) { return values.number("momentum") == 0 ? 0b0 : 0b1; }
  static void check(const RuleValues& values) {
    if (values.flag("nesterov") && (values.number("momentum") == 0 || values.number("dampening") != 0)) {
      throw InvalidArgument("SGD: nesterov needs a momentum above 0 and a dampening of 0, not " +
                            values.text("momentum") + " and " + values.text("dampening"));
    }
  }

  using Arguments = kernels::SgdArguments;
  static Arguments arguments(const RuleValues& values, const UpdateFacts& facts) {
    const double own = values.number("momentum");
    Arguments a;
    a.learning_rate = static_cast<float>(facts.learning_rate);
    a.momentum = static_cast<float>(own != 0 && facts.momentum >= 0 ? facts.momentum : own);
    a.dampening = static_cast<float>(values.number("dampening"));
    a.weight_decay = static_cast<float>(values.number("weight_decay"));
    a.nesterov = values.flag("nesterov");
    a.first_step = facts.step <= 1;
    a.gradient_scale = facts.gradient_scale;
    a.apply = facts.apply;
    return a;
  }

  template <unsigned kept>
  static constexpr void element(const Arguments& a, float g, float& w, float (&states)[1]) {
    g = g * a.gradient_scale + a.weight_decay * w;
    float direction = g;
    if (kept == 0b1 && a.momentum != 0) {
      float& buffer = states[0];
      buffer = a.first_step ? g : a.momentum * buffer + (1.0f - a.dampening) * g;
      direction = a.nesterov ? g + a.momentum * buffer : buffer;
    }
    w = w - a.learning_rate * direction;
  }
};

using Rules = std::tuple<Sgd>;

}  // namespace tranche::rules::sgd
