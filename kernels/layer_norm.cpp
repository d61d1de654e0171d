#include "tranche/kernels/layer_norm.h"

#include <utility>

#include "kernels/check.h"
#include "kernels/cpu/norm.h"
#include "kernels/cuda/norm.h"
#include "kernels/dispatch.h"
#include "kernels/meta/norm_cost.h"

namespace tranche::kernels {

namespace {

cpu::NormForward checked_forward(std::string_view kernel, std::string_view x_name, const ConstTensorView& x,
                                 const ConstTensorView& weight, const ConstTensorView& bias, float epsilon,
                                 const TensorView& y, const TensorView& mean, const TensorView& rstd,
                                 int threads) {
  check_floating(kernel, x_name, x.dtype);
  const auto [rows, columns] = check_rows(kernel, x_name, x);
  check_tensor(kernel, "weight", weight, {x.dtype}, columns);
  check_tensor(kernel, "bias", bias, {x.dtype}, columns);
  check_tensor(kernel, "y", y, {x.dtype}, x.elements());
  check_tensor(kernel, "mean", mean, {DataType::float32}, rows);
  check_tensor(kernel, "rstd", rstd, {DataType::float32}, rows);
  return {.rows = rows,
          .columns = columns,
          .dtype = x.dtype,
          .x = x.data,
          .weight = weight.data,
          .bias = bias.data,
          .epsilon = epsilon,
          .y = y.data,
          .mean = mean.as<float>(),
          .rstd = rstd.as<float>(),
          .threads = threads};
}

}  // namespace

void layer_norm_forward(Stream& stream, const ConstTensorView& x, const ConstTensorView& weight,
                        const ConstTensorView& bias, float epsilon, const TensorView& y,
                        const TensorView& mean, const TensorView& rstd) {
  constexpr std::string_view kernel = "layer_norm_forward";
  const cpu::NormForward call =
      checked_forward(kernel, "x", x, weight, bias, epsilon, y, mean, rstd, stream.threads());
  dispatch(
      stream, kernel, meta::layer_norm_forward_cost(call.rows, call.columns, x.dtype),
      [call] { cpu::norm_forward(call); },
      [&] { cuda::layer_norm_forward(stream, x, weight, bias, epsilon, y, mean, rstd); });
}

void residual_layer_norm_forward(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                                 const ConstTensorView& weight, const ConstTensorView& bias, float epsilon,
                                 const TensorView& residual, const TensorView& y, const TensorView& mean,
                                 const TensorView& rstd) {
  constexpr std::string_view kernel = "residual_layer_norm_forward";
  cpu::NormForward call =
      checked_forward(kernel, "residual", residual, weight, bias, epsilon, y, mean, rstd, stream.threads());
  for (const auto& [operand, view] :
       {std::pair<std::string_view, const ConstTensorView*>{"a", &a}, {"b", &b}}) {
    check_tensor(kernel, operand, *view, {residual.dtype}, residual.elements());
  }
  call.x = a.data;
  call.addend = b.data;
  call.sum = residual.data;
  dispatch(
      stream, kernel,
      meta::residual_norm_cost(meta::layer_norm_forward_cost(call.rows, call.columns, residual.dtype),
                               residual),
      [call] { cpu::norm_forward(call); },
      [&] {
        cuda::residual_layer_norm_forward(stream, a, b, weight, bias, epsilon, residual, y, mean, rstd);
      });
}

void layer_norm_backward(Stream& stream, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& weight, const ConstTensorView& mean,
                         const ConstTensorView& rstd, bool accumulate_dx, const TensorView& dx,
                         const TensorView& weight_gradient, const TensorView& bias_gradient,
                         const Workspace& workspace) {
  constexpr std::string_view kernel = "layer_norm_backward";
  check_floating(kernel, "x", x.dtype);
  const auto [rows, columns] = check_rows(kernel, "x", x);
  check_tensor(kernel, "dy", dy, {x.dtype}, x.elements());
  check_tensor(kernel, "weight", weight, {x.dtype}, columns);
  check_tensor(kernel, "mean", mean, {DataType::float32}, rows);
  check_tensor(kernel, "rstd", rstd, {DataType::float32}, rows);
  check_tensor(kernel, "dx", dx, {x.dtype}, x.elements());
  check_tensor(kernel, "weight_gradient", weight_gradient, {DataType::float32}, columns);
  check_tensor(kernel, "bias_gradient", bias_gradient, {DataType::float32}, columns);
  const cpu::NormBackward call{.rows = rows,
                               .columns = columns,
                               .dtype = x.dtype,
                               .dy = dy.data,
                               .x = x.data,
                               .weight = weight.data,
                               .mean = mean.as<float>(),
                               .rstd = rstd.as<float>(),
                               .accumulate_dx = accumulate_dx,
                               .dx = dx.data,
                               .weight_gradient = weight_gradient.as<float>(),
                               .bias_gradient = bias_gradient.as<float>(),
                               .workspace = workspace,
                               .threads = stream.threads()};
  dispatch(
      stream, kernel, meta::layer_norm_backward_cost(rows, columns, x.dtype, accumulate_dx),
      [call] { cpu::norm_backward(call); },
      [&] {
        check_workspace(kernel, workspace, 8 * call.columns);
        cuda::layer_norm_backward(stream, dy, x, weight, mean, rstd, accumulate_dx, dx, weight_gradient,
                                  bias_gradient, workspace);
      });
}

}  // namespace tranche::kernels
