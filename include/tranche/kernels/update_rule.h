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
/// and, in place of element(), the members of rules with a trust ratio (LARS, LAMB):
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

/// The values in [least, below); the text follows "it must be ...".
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
  double first = 0, second = 0;  ///< the default; infinite: off unless given
  RuleRange range = any_finite;
  std::string_view meaning;
  std::span<const std::string_view> choices = {};  ///< texts; the value is an index into them
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
  bool reducible = true;      ///< stored as tranche.moments asks (bf16, block8); false: always fp32
  bool not_negative = false;  ///< no element is ever negative, so block8 needs no codes for signs
};

/// The facts of a step that a rule may use, for the tensors of one parameter group.
struct UpdateFacts {
  std::int64_t step = 1;     ///< 1 for the first applied update
  double learning_rate = 0;  ///< the group's
  double momentum = -1;      ///< from a schedule that cycles it; negative: the rule's own
  float gradient_scale = 1;  ///< multiplies every gradient
  bool apply = true;         ///< false: nothing may change
};

struct UpdateRule;

/// A rule's options with their values.
class RuleValues {
 public:
  /// Starts with all defaults. `type` is one of the rule's and outlives this.
  RuleValues(const UpdateRule& rule, std::string_view type);
  /// Throws InvalidArgument for an unknown name and values out of its range.
  void set(std::string_view name, double first, double second = 0);
  bool has(std::string_view name) const;
  std::string_view type() const { return type_; }
  /// Throws LogicError for a name that the rule does not have.
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

/// A template, because Clang refuses a constexpr function that is never constant, as it takes this to be.
template <int = 0>
constexpr float square_root(float x) {
  return __builtin_sqrtf(x);
}
/// The greater of a and b; b if either is a NaN.
constexpr float larger(float a, float b) {
  return a > b ? a : b;
}
/// The sign: 1 or -1; 0 for zeros and NaNs.
constexpr float sign_of(float x) {
  return x > 0 ? 1.0f : (x < 0 ? -1.0f : 0.0f);
}

namespace kernels {

inline constexpr int most_rule_states = 4;

/// The part of an update that runs: all of it, or for a rule with a trust ratio the part before the sums
/// (advance) or after them (finish).
enum class RulePhase : std::uint8_t { update, advance, finish };

/// A few hundred elements in the core's caches, in fp32 except for the gradient, which may be bf16. It holds
/// only the states that are kept.
struct RuleBlock {
  std::int64_t count = 0;
  const void* gradient = nullptr;
  DataType gradient_type = DataType::float32;
  float* master = nullptr;
  float* state[most_rule_states] = {};
  float* direction = nullptr;  ///< written by direct() from the stored states, or by advance() if not null
  float ratio = 1;
  std::int64_t ahead = 0;  ///< prefetch distance in bytes
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
  /// Computes only `direction`, for a rule with a trust ratio.
  void (*direct)(const void* arguments, unsigned slots, const kernels::RuleBlock&);
  /// The GPU's version; null in builds without CUDA.
  RuleLaunch launch;
};

}  // namespace tranche
