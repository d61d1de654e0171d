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
  check_dtype(kernel, operand, moment.dtype, {DataType::float32, DataType::bfloat16});
  check_elements(kernel, operand, moment.elements(), master.elements());
}

void check_sgd(std::string_view kernel, const SgdArguments& arguments, const TensorView& momentum_buffer,
               const TensorView& master) {
  if (arguments.momentum == 0) return;
  check_moment(kernel, "momentum_buffer", momentum_buffer, master);
  if (momentum_buffer.data == nullptr && master.elements() > 0) {
    refuse(kernel, "momentum is not 0, but `momentum_buffer` has no data");
  }
}

void check_adam(std::string_view kernel, const ConstTensorView& gradient, const TensorView& master,
                const TensorView& exp_avg, const TensorView& exp_avg_sq, const TensorView& weight) {
  check_common(kernel, gradient, master, weight);
  check_moment(kernel, "exp_avg", exp_avg, master);
  check_moment(kernel, "exp_avg_sq", exp_avg_sq, master);
  if (exp_avg.dtype != exp_avg_sq.dtype) refuse(kernel, "`exp_avg` and `exp_avg_sq` differ in dtype");
}

/// The list's own order and bounds, and that every group is there.
void check_segments(std::string_view kernel, std::size_t groups, std::span<const UpdateSegment> segments,
                    std::int64_t elements) {
  std::int64_t end = 0;
  for (const UpdateSegment& segment : segments) {
    if (segment.first < end || segment.count < 0 || segment.count > elements - segment.first) {
      refuse(kernel,
             fmt::format("segment {} is [{}, {} + {}); it must lie between {}, the end of the one before "
                         "it, and {}, the elements of the stretch",
                         &segment - segments.data(), segment.first, segment.first, segment.count, end,
                         elements));
    }
    if (segment.group < 0 || static_cast<std::size_t>(segment.group) >= groups) {
      refuse(kernel, fmt::format("segment {} is of group {}, but there are {} groups",
                                 &segment - segments.data(), segment.group, groups));
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

/// The part of a view that a segment names; a view that is not there stays so.
template <class View>
View part_of(const View& view, const UpdateSegment& segment) {
  return view.data == nullptr ? view : view.slice(segment.first, segment.count);
}

/// Arguments that cost what an update costs whose scalars are known only on the device.
SgdArguments counted_as(const TensorView& momentum_buffer) {
  SgdArguments arguments;
  arguments.momentum = momentum_buffer.data == nullptr ? 0.0f : 1.0f;
  return arguments;
}

}  // namespace

void adam_update(Stream& stream, const AdamArguments& arguments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight) {
  constexpr std::string_view name = "adam_update";
  check_adam(name, gradient, master, exp_avg, exp_avg_sq, weight);
  dispatch(
      stream, name, meta::adam_update(gradient, master, exp_avg, exp_avg_sq, weight),
      [threads = stream.threads(), arguments, gradient, master, exp_avg, exp_avg_sq, weight] {
        const UpdateSegment all{0, master.elements(), 0};
        cpu::adam_update(threads, {&arguments, 1}, {&all, 1}, gradient, master, exp_avg, exp_avg_sq, weight);
      },
      [&] { cuda::adam_update(stream, arguments, gradient, master, exp_avg, exp_avg_sq, weight); });
}

void adam_update(Stream& stream, const AdamArguments* device_arguments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight) {
  constexpr std::string_view name = "adam_update";
  if (device_arguments == nullptr) refuse(name, "`device_arguments` is null");
  check_adam(name, gradient, master, exp_avg, exp_avg_sq, weight);
  dispatch(
      stream, name, meta::adam_update(gradient, master, exp_avg, exp_avg_sq, weight),
      [threads = stream.threads(), device_arguments, gradient, master, exp_avg, exp_avg_sq, weight] {
        const UpdateSegment all{0, master.elements(), 0};
        cpu::adam_update(threads, {device_arguments, 1}, {&all, 1}, gradient, master, exp_avg, exp_avg_sq,
                         weight);
      },
      [&] { cuda::adam_update(stream, device_arguments, gradient, master, exp_avg, exp_avg_sq, weight); });
}

void sgd_update(Stream& stream, const SgdArguments& arguments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight) {
  constexpr std::string_view name = "sgd_update";
  check_common(name, gradient, master, weight);
  check_sgd(name, arguments, momentum_buffer, master);
  dispatch(
      stream, name, meta::sgd_update(arguments, gradient, master, momentum_buffer, weight),
      [threads = stream.threads(), arguments, gradient, master, momentum_buffer, weight] {
        const UpdateSegment all{0, master.elements(), 0};
        cpu::sgd_update(threads, {&arguments, 1}, {&all, 1}, gradient, master, momentum_buffer, weight);
      },
      [&] { cuda::sgd_update(stream, arguments, gradient, master, momentum_buffer, weight); });
}

void sgd_update(Stream& stream, const SgdArguments* device_arguments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight) {
  constexpr std::string_view name = "sgd_update";
  if (device_arguments == nullptr) refuse(name, "`device_arguments` is null");
  check_common(name, gradient, master, weight);
  if (momentum_buffer.data != nullptr) check_moment(name, "momentum_buffer", momentum_buffer, master);
  dispatch(
      stream, name, meta::sgd_update(counted_as(momentum_buffer), gradient, master, momentum_buffer, weight),
      [threads = stream.threads(), device_arguments, gradient, master, momentum_buffer, weight] {
        SgdArguments arguments = *device_arguments;
        if (momentum_buffer.data == nullptr) arguments.momentum = 0;
        const UpdateSegment all{0, master.elements(), 0};
        cpu::sgd_update(threads, {&arguments, 1}, {&all, 1}, gradient, master, momentum_buffer, weight);
      },
      [&] { cuda::sgd_update(stream, device_arguments, gradient, master, momentum_buffer, weight); });
}

void adam_update_segments(Stream& stream, std::span<const AdamArguments> groups,
                          std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                          const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                          const TensorView& weight) {
  constexpr std::string_view name = "adam_update_segments";
  check_adam(name, gradient, master, exp_avg, exp_avg_sq, weight);
  check_segments(name, groups.size(), segments, master.elements());
  const std::int64_t covered = covered_elements(segments);
  dispatch(
      stream, name,
      meta::adam_update(counted(gradient, covered), counted(master, covered), counted(exp_avg, covered),
                        counted(exp_avg_sq, covered), counted(weight, covered)),
      [threads = stream.threads(), groups = std::vector(groups.begin(), groups.end()),
       segments = std::vector(segments.begin(), segments.end()), gradient, master, exp_avg, exp_avg_sq,
       weight] {
        cpu::adam_update(threads, groups, segments, gradient, master, exp_avg, exp_avg_sq, weight);
      },
      [&] {
        for (const UpdateSegment& segment : segments) {
          cuda::adam_update(stream, groups[static_cast<std::size_t>(segment.group)],
                            part_of(gradient, segment), part_of(master, segment), part_of(exp_avg, segment),
                            part_of(exp_avg_sq, segment), part_of(weight, segment));
        }
      });
}

void sgd_update_segments(Stream& stream, std::span<const SgdArguments> groups,
                         std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                         const TensorView& master, const TensorView& momentum_buffer,
                         const TensorView& weight) {
  constexpr std::string_view name = "sgd_update_segments";
  check_common(name, gradient, master, weight);
  for (const SgdArguments& group : groups) check_sgd(name, group, momentum_buffer, master);
  check_segments(name, groups.size(), segments, master.elements());
  meta::Cost cost;
  for (const UpdateSegment& segment : segments) {
    cost += meta::sgd_update(groups[static_cast<std::size_t>(segment.group)],
                             counted(gradient, segment.count), counted(master, segment.count),
                             counted(momentum_buffer, segment.count), counted(weight, segment.count));
  }
  dispatch(
      stream, name, cost,
      [threads = stream.threads(), groups = std::vector(groups.begin(), groups.end()),
       segments = std::vector(segments.begin(), segments.end()), gradient, master, momentum_buffer,
       weight] { cpu::sgd_update(threads, groups, segments, gradient, master, momentum_buffer, weight); },
      [&] {
        for (const UpdateSegment& segment : segments) {
          cuda::sgd_update(stream, groups[static_cast<std::size_t>(segment.group)],
                           part_of(gradient, segment), part_of(master, segment),
                           part_of(momentum_buffer, segment), part_of(weight, segment));
        }
      });
}

}  // namespace tranche::kernels
