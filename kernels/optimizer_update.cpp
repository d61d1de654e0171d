#include "tranche/kernels/optimizer_update.h"

#include <fmt/core.h>

#include <array>
#include <bit>
#include <string>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/optimizer_update.h"
#include "kernels/dispatch.h"
#include "kernels/meta/optimizer_update_cost.h"
#include "tranche/core/error.h"

namespace tranche::kernels {

namespace {

void check_common(std::string_view kernel, const RuleOperands& of) {
  check_dtype(kernel, "master", of.master.dtype, {DataType::float32, DataType::bfloat16, DataType::uint16});
  check_floating(kernel, "gradient", of.gradient.dtype);
  check_elements(kernel, "gradient", of.gradient.elements(), of.master.elements());
  if (of.weight.data != nullptr) {
    check_floating(kernel, "weight", of.weight.dtype);
    check_elements(kernel, "weight", of.weight.elements(), of.master.elements());
  }
  // The rounding must suit the format of the master weights.
  const bool fp32 = of.master.dtype == DataType::float32, halves = of.master.dtype == DataType::uint16;
  if (halves && of.weight.data == nullptr) {
    refuse(kernel, "`master` holds lower halves, so `weight`, which holds the upper ones, must be given");
  }
  if ((!fp32 || of.rounding != WeightRounding::nearest_even) && of.weight.data != nullptr) {
    check_dtype(kernel, "weight", of.weight.dtype, {DataType::bfloat16});
  }
  if (halves != (of.rounding == WeightRounding::half_away) &&
      !(fp32 && of.rounding == WeightRounding::half_away)) {
    refuse(kernel, halves ? "a `master` of lower halves needs the rounding half_away"
                          : "a bf16 `master` needs the rounding nearest_even or stochastic");
  }
  if (of.rounding == WeightRounding::stochastic && (fp32 || of.rounding_key == nullptr)) {
    refuse(kernel, fp32 ? "an fp32 `master` cannot be rounded stochastically" : "`rounding_key` is null");
  }
}

void check_states(const UpdateRule& rule, const RuleOperands& of) {
  const std::string_view kernel = rule.kernel;
  if (of.state.size() != static_cast<std::size_t>(std::popcount(of.slots))) {
    refuse(kernel,
           fmt::format("{} state tensors come instead of {}", of.state.size(), std::popcount(of.slots)));
  }
  std::size_t next = 0;
  std::string_view first;
  for (std::size_t slot = 0; slot < rule.states.size(); ++slot) {
    if ((of.slots >> slot & 1) == 0) continue;
    const TensorView& state = of.state[next++];
    const std::string_view name = rule.states[slot].name;
    check_tensor(kernel, name, state,
                 {DataType::float32, DataType::bfloat16, DataType::block8, DataType::block8_unsigned},
                 of.master.elements());
    if (first.empty()) first = name;
    if (state.dtype != of.state[0].dtype && !(is_block(state.dtype) && is_block(of.state[0].dtype))) {
      refuse(kernel, fmt::format("`{}` and `{}` differ in dtype", first, name));
    }
  }
}

/// Checks that the groups exist, and the order and bounds of the segments.
void check_segments(const UpdateRule& rule, RulePhase phase, const RuleOperands& of) {
  const std::string_view kernel = rule.kernel;
  if (of.arguments == nullptr) refuse(kernel, "the address of `arguments` is null");
  const std::int64_t elements = of.master.elements();
  const std::int64_t block = of.state.empty() ? 1 : block_elements_of(of.state[0].dtype);
  std::int64_t end = 0;
  for (const UpdateSegment& segment : of.segments) {
    const auto number = &segment - of.segments.data();
    if (segment.first % block != 0) {
      refuse(kernel, fmt::format("segment {} begins at element {}, within a block of {}", number,
                                 segment.first, block));
    }
    if (segment.first < end || segment.count < 0 || segment.count > elements - segment.first) {
      refuse(kernel, fmt::format("segment {} is [{}, {} + {}); it must lie between {}, the end of the one "
                                 "before it, and {}, the elements of the range",
                                 number, segment.first, segment.first, segment.count, end, elements));
    }
    if (segment.group < 0 || segment.group >= of.groups) {
      refuse(kernel, fmt::format("segment {} is of group {}, but there are {} groups", number, segment.group,
                                 of.groups));
    }
    if ((phase == RulePhase::advance && segment.partial == nullptr) ||
        (phase == RulePhase::finish && segment.sums == nullptr)) {
      refuse(kernel, fmt::format("segment {} comes without sums", number));
    }
    end = segment.first + segment.count;
  }
}

std::int64_t covered_elements(std::span<const UpdateSegment> segments) {
  std::int64_t covered = 0;
  for (const UpdateSegment& segment : segments) covered += segment.count;
  return covered;
}

const UpdateRule& rule_of(std::string_view kernel) {
  for (const UpdateRule* rule : built_in_rules()) {
    if (rule->kernel == kernel) return *rule;
  }
  throw LogicError(fmt::format("there is no rule {}", kernel));
}

template <class Arguments>
RuleOperands operands_of(const GroupArguments<Arguments>& arguments,
                         std::span<const UpdateSegment> segments) {
  RuleOperands of;
  of.arguments = reinterpret_cast<const std::byte*>(arguments.first);
  of.groups = arguments.groups;
  of.stride = arguments.stride;
  of.segments = segments;
  return of;
}

}  // namespace

void rule_update(Stream& stream, const UpdateRule& rule, RulePhase phase, const RuleOperands& operands) {
  check_common(rule.kernel, operands);
  check_states(rule, operands);
  check_segments(rule, phase, operands);
  if (rule.trust != (phase != RulePhase::update)) {
    refuse(rule.kernel, rule.trust ? "a rule with a trust ratio updates in two phases"
                                   : "a rule without a trust ratio updates in one phase");
  }
  dispatch(
      stream, rule.kernel, meta::rule_update(rule, phase, operands, covered_elements(operands.segments)),
      [threads = stream.threads(), &rule, phase, own = operands,
       segments = std::vector(operands.segments.begin(), operands.segments.end()),
       state = std::vector(operands.state.begin(), operands.state.end())]() mutable {
        own.segments = segments;
        own.state = state;
        cpu::rule_update(threads, rule, phase, own);
      },
      [&] {
        if (rule.launch == nullptr) {
          throw NotCompiled(fmt::format("{} on a GPU (zero_optimization.offload_optimizer.device cpu updates "
                                        "in host memory)",
                                        rule.kernel),
                            "a CUDA compiler in the project that calls tranche_add_optimizer");
        }
        rule.launch(stream, phase, operands);
      });
}

void adam_update(Stream& stream, const GroupArguments<AdamArguments>& arguments,
                 std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight) {
  const std::array state{exp_avg, exp_avg_sq};
  RuleOperands of = operands_of(arguments, segments);
  of.slots = 0b11;
  of.gradient = gradient;
  of.master = master;
  of.state = state;
  of.weight = weight;
  rule_update(stream, rule_of("adam_update"), RulePhase::update, of);
}

void sgd_update(Stream& stream, const GroupArguments<SgdArguments>& arguments,
                std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight) {
  RuleOperands of = operands_of(arguments, segments);
  if (momentum_buffer.data != nullptr) {
    of.slots = 0b1;
    of.state = {&momentum_buffer, 1};
  }
  of.gradient = gradient;
  of.master = master;
  of.weight = weight;
  rule_update(stream, rule_of("sgd_update"), RulePhase::update, of);
}

}  // namespace tranche::kernels
