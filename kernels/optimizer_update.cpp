#include "tranche/kernels/optimizer_update.h"

#include <fmt/core.h>

#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/optimizer_update.h"
#include "kernels/cuda/optimizer_update.h"
#include "kernels/dispatch.h"
#include "kernels/meta/optimizer_update_cost.h"

namespace tranche::kernels {

namespace {

void check_common(std::string_view kernel, const ConstTensorView& gradient, const TensorView& master,
                  const TensorView& weight) {
  check_dtype(kernel, "master", master.dtype, {DataType::float32});
  check_floating(kernel, "gradient", gradient.dtype);
  check_elements(kernel, "gradient", gradient.elements(), master.elements());
  if (weight.data != nullptr) {
    check_floating(kernel, "weight", weight.dtype);
    check_elements(kernel, "weight", weight.elements(), master.elements());
  }
}

void check_moment(std::string_view kernel, std::string_view operand, const TensorView& moment,
                  const TensorView& master) {
  check_tensor(kernel, operand, moment, {DataType::float32, DataType::bfloat16}, master.elements());
}

/// Groups that are there, and the list's own order and bounds.
template <class Arguments>
void check_segments(std::string_view kernel, const GroupArguments<Arguments>& arguments,
                    std::span<const UpdateSegment> segments, std::int64_t elements) {
  if (arguments.first == nullptr) refuse(kernel, "the address of `arguments` is null");
  std::int64_t end = 0;
  for (const UpdateSegment& segment : segments) {
    if (segment.first < end || segment.count < 0 || segment.count > elements - segment.first) {
      refuse(kernel, fmt::format("segment {} is [{}, {} + {}); it must lie between {}, the end of the one "
                                 "before it, and {}, the elements of the range",
                                 &segment - segments.data(), segment.first, segment.first, segment.count, end,
                                 elements));
    }
    if (segment.group < 0 || segment.group >= arguments.groups) {
      refuse(kernel, fmt::format("segment {} is of group {}, but there are {} groups",
                                 &segment - segments.data(), segment.group, arguments.groups));
    }
    end = segment.first + segment.count;
  }
}

std::int64_t covered_elements(std::span<const UpdateSegment> segments) {
  std::int64_t covered = 0;
  for (const UpdateSegment& segment : segments) covered += segment.count;
  return covered;
}

/// A view of as many elements, for cost functions.
TensorView counted(const ConstTensorView& view, std::int64_t elements) {
  return {const_cast<void*>(view.data), view.dtype, Shape{elements}};
}

}  // namespace

void adam_update(Stream& stream, const GroupArguments<AdamArguments>& arguments,
                 std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight) {
  constexpr std::string_view name = "adam_update";
  check_common(name, gradient, master, weight);
  check_moment(name, "exp_avg", exp_avg, master);
  check_moment(name, "exp_avg_sq", exp_avg_sq, master);
  if (exp_avg.dtype != exp_avg_sq.dtype) refuse(name, "`exp_avg` and `exp_avg_sq` differ in dtype");
  check_segments(name, arguments, segments, master.elements());
  const std::int64_t covered = covered_elements(segments);
  dispatch(
      stream, name,
      meta::adam_update(counted(gradient, covered), counted(master, covered), counted(exp_avg, covered),
                        counted(exp_avg_sq, covered), counted(weight, covered)),
      [threads = stream.threads(), arguments, owned = std::vector(segments.begin(), segments.end()), gradient,
       master, exp_avg, exp_avg_sq, weight] {
        cpu::adam_update(threads, arguments, owned, gradient, master, exp_avg, exp_avg_sq, weight);
      },
      [&] { cuda::adam_update(stream, arguments, segments, gradient, master, exp_avg, exp_avg_sq, weight); });
}

void sgd_update(Stream& stream, const GroupArguments<SgdArguments>& arguments,
                std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight) {
  constexpr std::string_view name = "sgd_update";
  check_common(name, gradient, master, weight);
  if (momentum_buffer.data != nullptr) check_moment(name, "momentum_buffer", momentum_buffer, master);
  check_segments(name, arguments, segments, master.elements());
  const std::int64_t covered = covered_elements(segments);
  dispatch(
      stream, name,
      meta::sgd_update(counted(gradient, covered), counted(master, covered),
                       counted(momentum_buffer, covered), counted(weight, covered)),
      [threads = stream.threads(), arguments, owned = std::vector(segments.begin(), segments.end()), gradient,
       master, momentum_buffer,
       weight] { cpu::sgd_update(threads, arguments, owned, gradient, master, momentum_buffer, weight); },
      [&] { cuda::sgd_update(stream, arguments, segments, gradient, master, momentum_buffer, weight); });
}

}  // namespace tranche::kernels
