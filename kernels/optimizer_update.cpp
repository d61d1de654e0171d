#include "tranche/kernels/optimizer_update.h"

#include "tranche/kernels/check.h"
#include "tranche/kernels/cpu/optimizer_update.h"
#include "tranche/kernels/cuda/optimizer_update.h"
#include "tranche/kernels/dispatch.h"
#include "tranche/kernels/meta/optimizer_update_cost.h"

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

void check_adam(std::string_view kernel, const ConstTensorView& gradient, const TensorView& master,
                const TensorView& exp_avg, const TensorView& exp_avg_sq, const TensorView& weight) {
  check_common(kernel, gradient, master, weight);
  check_moment(kernel, "exp_avg", exp_avg, master);
  check_moment(kernel, "exp_avg_sq", exp_avg_sq, master);
  if (exp_avg.dtype != exp_avg_sq.dtype) refuse(kernel, "`exp_avg` and `exp_avg_sq` differ in dtype");
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
        cpu::adam_update(threads, arguments, gradient, master, exp_avg, exp_avg_sq, weight);
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
        cpu::adam_update(threads, *device_arguments, gradient, master, exp_avg, exp_avg_sq, weight);
      },
      [&] { cuda::adam_update(stream, device_arguments, gradient, master, exp_avg, exp_avg_sq, weight); });
}

void sgd_update(Stream& stream, const SgdArguments& arguments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight) {
  constexpr std::string_view name = "sgd_update";
  check_common(name, gradient, master, weight);
  if (arguments.momentum != 0) {
    check_moment(name, "momentum_buffer", momentum_buffer, master);
    if (momentum_buffer.data == nullptr && master.elements() > 0) {
      refuse(name, "momentum is not 0, but `momentum_buffer` has no data");
    }
  }
  dispatch(
      stream, name, meta::sgd_update(arguments, gradient, master, momentum_buffer, weight),
      [threads = stream.threads(), arguments, gradient, master, momentum_buffer, weight] {
        cpu::sgd_update(threads, arguments, gradient, master, momentum_buffer, weight);
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
        cpu::sgd_update(threads, arguments, gradient, master, momentum_buffer, weight);
      },
      [&] { cuda::sgd_update(stream, device_arguments, gradient, master, momentum_buffer, weight); });
}

}  // namespace tranche::kernels
