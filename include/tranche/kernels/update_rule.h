#pragma once
/// An optimizer's update rule as one file, ours (kernels/rules/) or a program's (CMake's
/// tranche_add_optimizer). A rule for tensors `w` with gradients `g` is a struct, the only entry of
/// `using Rules = std::tuple<...>` or one of several, in namespace tranche::rules::NAME_OF_THE_FILE:
///
/// @code
///   struct Descent {
///     static constexpr std::string_view types[] = {"Descent"};      // optimizer.type
///     static constexpr std::string_view kernel = "descent_update";  // in traces and refusals
///     static constexpr double learning_rate = 0.001;                // where none is given
///     static constexpr RuleOption options[] = {number_option("weight_decay", 0, not_negative, "decoupled")};
///     static constexpr RuleState states[] = {{"momentum_buffer"}};
///     static constexpr unsigned slots[] = {0b1};  // sets of states that element() is compiled for
///     static unsigned kept(const RuleValues&) { return 0b1; }       // the set that these values want
///     static constexpr double operations(unsigned) { return 6; }    // an element's, for plans
///     struct Arguments { float rate, ...; float gradient_scale; bool apply; };  // trivially copyable
///     static Arguments arguments(const RuleValues&, const UpdateFacts&);
///     template <unsigned kept>
///     static constexpr void element(const Arguments&, float g, float& w, float (&states)[1]);
///   };
/// @endcode
///
/// Optional members:
/// @code
///     static void check(const RuleValues&);                  // throws InvalidArgument
///     static std::string_view name(const RuleValues&);       // where it is not the type
///     static float initial_value(const RuleValues&, int slot);  // of a state, where it is not 0
///     static constexpr bool whole_matrices = true;           // Muon's alone: an Optimizer runs it
/// @endcode
/// and, in place of element(), what rules with a trust ratio have (LARS, LAMB):
/// @code
///     static constexpr bool states_first = ...;
///     template <unsigned kept>  // states_first alone: the states' new values
///     static constexpr void advance(const Arguments&, float g, float w, float (&states)[n]);
///     template <unsigned kept>  // the direction whose norm counts; states_first: from new states, g is 0
///     static constexpr float direction(const Arguments&, float g, float w, const float (&states)[n]);
///     static constexpr float ratio(const Arguments&, double weight_norm, double direction_norm);
///     template <unsigned kept>  // states are written unless states_first
///     static constexpr void finish(const Arguments&, float ratio, float direction, float& w,
///                                  float (&states)[n]);
/// @endcode
/// The norms are those of whole tensors over all ranks, roots of sums without rounding. direction() sees the
/// states as they are stored, so both calls of it (for the norm, and before finish()) give the same bits.
///
/// The arithmetic of an element is plain fp32: IEEE operations with square_root(), larger() and sign_of() of
/// this header. It is compiled for every instruction set and, by nvcc, for GPUs, without contraction, so all
/// of them give the same bits. Whatever is the same for all elements belongs in Arguments.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tranche/core/exact_sum.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche {

/// The values from `least` up to, but without, `below`; the text ends "it must be ...".
struct RuleRange {
  double least, below;
  std::string_view text;
};
inline constexpr double no_bound = std::numeric_limits<double>::infinity();
inline constexpr RuleRange share_range{0, 1, "at least 0 and below 1"};
inline constexpr RuleRange not_negative{0, no_bound, "finite and not negative"};
inline constexpr RuleRange any_finite{std::numeric_limits<double>::lowest(), no_bound, "a finite number"};

/// A key of optimizer.params.
struct RuleOption {
  enum class Kind : std::uint8_t { number, pair, flag, choice };
  std::string_view name;
  Kind kind = Kind::number;
  double first = 0, second = 0;  ///< the default; infinite: it is off unless it is given
  RuleRange range = any_finite;
  std::string_view meaning;
  std::span<const std::string_view> choices = {};  ///< texts, of which the value is the number of one
};
constexpr RuleOption number_option(std::string_view name, double default_value, RuleRange range,
                                   std::string_view meaning) {
  return {name, RuleOption::Kind::number, default_value, 0, range, meaning};
}
constexpr RuleOption pair_option(std::string_view name, double first, double second, RuleRange range,
                                 std::string_view meaning) {
  return {name, RuleOption::Kind::pair, first, second, range, meaning};
}
constexpr RuleOption flag_option(std::string_view name, bool default_value, std::string_view meaning) {
  return {name, RuleOption::Kind::flag, default_value ? 1.0 : 0.0, 0, any_finite, meaning};
}

/// One of several texts; the default is the first.
constexpr RuleOption choice_option(std::string_view name, std::span<const std::string_view> choices,
                                   std::string_view meaning) {
  return {name, RuleOption::Kind::choice, 0, 0, any_finite, meaning, choices};
}

/// A state tensor that a rule may keep.
struct RuleState {
  std::string_view name;
  bool reducible = true;  ///< kept in bf16 or block8 where tranche.moments asks for it; false: fp32 always
  bool not_negative = false;  ///< no element is ever below 0: block8 spends no code on signs
};

/// A step as a rule sees it, for the tensors of one parameter group.
struct UpdateFacts {
  std::int64_t step = 1;     ///< 1 for the first applied update
  double learning_rate = 0;  ///< the group's
  double momentum = -1;      ///< of a schedule that cycles it; negative: the rule's own
  float gradient_scale = 1;  ///< multiplies every gradient
  bool apply = true;         ///< false: nothing may change
};

struct UpdateRule;

/// A rule's options with their values.
class RuleValues {
 public:
  /// All defaults. `type` is one of the rule's and outlives this.
  RuleValues(const UpdateRule& rule, std::string_view type);
  /// Throws InvalidArgument for a name that the rule does not have and values out of its range.
  void set(std::string_view name, double first, double second = 0);
  bool has(std::string_view name) const;
  std::string_view type() const { return type_; }
  /// LogicError for a name that the rule does not have.
  double number(std::string_view name) const { return values_[index_of(name)].first; }
  double second(std::string_view name) const { return values_[index_of(name)].second; }
  bool flag(std::string_view name) const { return number(name) != 0; }
  /// The value as JSON.
  std::string text(std::string_view name) const;
  const UpdateRule& rule() const { return *rule_; }

 private:
  std::size_t index_of(std::string_view name) const;
  const UpdateRule* rule_;
  std::string_view type_;
  std::vector<std::pair<double, double>> values_;
};

/// A template, since Clang has no constant expression of it and refuses a constexpr function without any.
template <int = 0>
constexpr float square_root(float x) {
  return __builtin_sqrtf(x);
}
/// b where either is a NaN.
constexpr float larger(float a, float b) {
  return a > b ? a : b;
}
/// 1, -1, or 0 for zeros and NaNs.
constexpr float sign_of(float x) {
  return x > 0 ? 1.0f : (x < 0 ? -1.0f : 0.0f);
}

namespace kernels {

inline constexpr int most_rule_states = 4;

/// The part of an update that runs: all of it, or of a rule with a trust ratio what comes before the sums and
/// what comes behind.
enum class RulePhase : std::uint8_t { update, advance, finish };

/// A few hundred elements near the core, in fp32 but for the gradient, which may be bf16. Of the states those
/// that are kept.
struct RuleBlock {
  std::int64_t count = 0;
  const void* gradient = nullptr;
  DataType gradient_type = DataType::float32;
  float* master = nullptr;
  float* state[most_rule_states] = {};
  float* direction = nullptr;  ///< direct() writes it from the stored states, or advance() where it is given
  float ratio = 1;
  std::int64_t ahead = 0;  ///< bytes of prefetch
};

struct UpdateSegment;
struct RuleOperands;

}  // namespace kernels

/// Launches a phase of a rule on a GPU's stream.
using RuleLaunch = void (*)(Stream&, kernels::RulePhase, const kernels::RuleOperands&);

/// The registry's entry of a rule, whether its file is the library's or a program's.
struct UpdateRule {
  std::span<const std::string_view> types;
  std::string_view kernel;
  double learning_rate;
  std::span<const RuleOption> options;
  std::span<const RuleState> states;
  std::span<const unsigned> slots;
  bool trust;         ///< has a trust ratio, and so sums
  bool states_first;  ///< see above
  bool whole_matrices;
  std::size_t argument_bytes;

  unsigned (*kept)(const RuleValues&);
  double (*operations)(unsigned slots);
  void (*check)(const RuleValues&);
  std::string_view (*name)(const RuleValues&);
  float (*initial_value)(const RuleValues&, int slot);
  std::vector<std::byte> (*arguments)(const RuleValues&, const UpdateFacts&);

  bool (*applies)(const void* arguments);
  float (*ratio)(const void* arguments, double weight_norm, double direction_norm);
  /// Computes a block; `slots` is one of this->slots.
  void (*block)(const void* arguments, unsigned slots, kernels::RulePhase, const kernels::RuleBlock&);
  /// The same for `direction` alone, of a rule with a trust ratio.
  void (*direct)(const void* arguments, unsigned slots, const kernels::RuleBlock&);
  /// On a GPU; null where the rule was built without.
  RuleLaunch launch;
};

}  // namespace tranche
