#pragma once
/// Muon (Jordan et al., 2024): momentum and update around the orthogonal factor of a hidden matrix, with the
/// keys of torch.optim.Muon and DeepSpeed; optim/muon.cpp computes that factor, and uses AdamW for other
/// tensors. With g = gradient * gradient_scale: m = m + (1 - momentum) (g - m), and the matrix to
/// orthogonalise is u = nesterov ? m + (1 - momentum) (g - m) : m; then w = w - (rate * weight_decay) * w -
/// rate * o, where o is the factor times the number that adjust_lr_fn gives.

#include <array>
#include <cmath>

#include "tranche/core/error.h"
#include "tranche/kernels/update_rule.h"

namespace tranche::rules::muon {

inline constexpr RuleRange step_range{1, 101, "a whole number from 1 to 100"};
inline constexpr std::string_view coefficient_choices[] = {"polar_express", "keller"};
inline constexpr std::string_view adjust_choices[] = {"match_rms_adamw", "original"};

/// The momentum rule. It leaves u in the memory of `w`.
struct Muon {
  static constexpr std::string_view types[] = {"Muon"};
  static constexpr std::string_view kernel = "muon_momentum";
  static constexpr double learning_rate = 1e-3;
  static constexpr bool whole_matrices = true;
  static constexpr RuleOption options[] = {
      number_option("momentum", 0.95, share_range, "of hidden matrices"),
      flag_option("nesterov", true, "looks ahead by a step of the momentum"),
      number_option("weight_decay", 0, not_negative, "decoupled, of AdamW's tensors too"),
      number_option("ns_steps", 5, step_range, "Newton-Schulz iterations"),
      choice_option("ns_coefficients", coefficient_choices, "of the iterations: polar_express or keller"),
      choice_option(
          "adjust_lr_fn", adjust_choices,
          "factor of a matrix's rate: match_rms_adamw, 0.2 sqrt(the larger of its extents), or original, "
          "sqrt(max(1, outputs / inputs))"),
      number_option("muon_lr", no_bound, not_negative, "learning rate of hidden matrices (lr without it)"),
      number_option("adam_lr", no_bound, not_negative, "learning rate of AdamW's tensors (lr without it)"),
      pair_option("betas", 0.9, 0.999, share_range, "of AdamW's tensors"),
      number_option("eps", 1e-8, not_negative, "of AdamW's tensors")};
  static constexpr RuleState states[] = {{"momentum_buffer"}};
  static constexpr unsigned slots[] = {0b1};
  static constexpr double operations(unsigned) { return 7; }
  static unsigned kept(const RuleValues&) { return 0b1; }
  static void check(const RuleValues& values) {
    const double steps = values.number("ns_steps");
    if (steps == std::floor(steps)) return;
    throw InvalidArgument("Muon: ns_steps is " + values.text("ns_steps") + "; it must be " +
                          std::string(step_range.text));
  }

  struct Arguments {
    float share, gradient_scale;
    bool nesterov, apply;
  };
  static Arguments arguments(const RuleValues& values, const UpdateFacts& facts) {
    Arguments a{};
    a.share = static_cast<float>(1 - values.number("momentum"));
    a.gradient_scale = facts.gradient_scale;
    a.nesterov = values.flag("nesterov");
    a.apply = facts.apply;
    return a;
  }
  template <unsigned kept>
  static constexpr void element(const Arguments& a, float g, float& w, float (&states)[1]) {
    float& m = states[0];
    g = g * a.gradient_scale;
    m = m + a.share * (g - m);
    w = a.nesterov ? m + a.share * (g - m) : m;
  }
};

/// The step along the orthogonal factor of u, which is passed as the gradient. It has no optimizer.type.
struct Step {
  static constexpr std::array<std::string_view, 0> types = {};
  static constexpr std::string_view kernel = "muon_step";
  static constexpr double learning_rate = 1e-3;
  static constexpr RuleOption options[] = {number_option("weight_decay", 0, not_negative, "decoupled")};
  static constexpr RuleState states[] = {{"none"}};
  static constexpr unsigned slots[] = {0b0};
  static constexpr double operations(unsigned) { return 4; }
  static unsigned kept(const RuleValues&) { return 0b0; }

  struct Arguments {
    float learning_rate, weight_decay;
    bool apply;
  };
  static Arguments arguments(const RuleValues& values, const UpdateFacts& facts) {
    Arguments a{};
    a.learning_rate = static_cast<float>(facts.learning_rate);
    a.weight_decay = static_cast<float>(values.number("weight_decay"));
    a.apply = facts.apply;
    return a;
  }
  template <unsigned kept>
  static constexpr void element(const Arguments& a, float g, float& w, float (&)[1]) {
    w = w - (a.learning_rate * a.weight_decay) * w;
    w = w - a.learning_rate * g;
  }
};

using Rules = std::tuple<Muon, Step>;

}  // namespace tranche::rules::muon
