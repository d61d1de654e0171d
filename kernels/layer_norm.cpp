#include "tranche/kernels/layer_norm.h"

#include <string>
#include <utility>

#include "kernels/check.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/layer_norm.h"
#include "kernels/cuda/layer_norm.h"
#include "kernels/dispatch.h"
#include "kernels/meta/layer_norm_cost.h"

namespace tranche::kernels {

namespace {

std::int64_t columns_of(std::string_view kernel, std::string_view name, const ConstTensorView& x) {
  const std::string operand = "`" + std::string(name) + "`";
  if (x.shape.rank() == 0) refuse(kernel, operand + " is a scalar, wanted at least 1 dimension");
  const std::int64_t columns = x.shape[x.shape.rank() - 1];
  if (columns == 0) {
    refuse(kernel, operand + " has shape " + x.shape.to_string() + ", wanted a last dimension above 0");
  }
  return columns;
}

cpu::LayerNormForward checked_forward(std::string_view kernel, std::string_view x_name,
                                      const ConstTensorView& x, const ConstTensorView& weight,
                                      const ConstTensorView& bias, float epsilon, const TensorView& y,
                                      const TensorView& mean, const TensorView& rstd, int threads) {
  check_floating(kernel, x_name, x.dtype);
  const std::int64_t columns = columns_of(kernel, x_name, x);
  const std::int64_t rows = x.elements() / columns;
  check_tensor(kernel, "weight", weight, {x.dtype}, columns);
  check_tensor(kernel, "bias", bias, {x.dtype}, columns);
  check_tensor(kernel, "y", y, {x.dtype}, x.elements());
  check_tensor(kernel, "mean", mean, {DataType::float32}, rows);
  check_tensor(kernel, "rstd", rstd, {DataType::float32}, rows);
  return {rows,    columns, x.dtype,          x.data,           weight.data, bias.data,
          epsilon, y.data,  mean.as<float>(), rstd.as<float>(), threads};
}

}  // namespace

void layer_norm_forward(Stream& stream, const ConstTensorView& x, const ConstTensorView& weight,
                        const ConstTensorView& bias, float epsilon, const TensorView& y,
                        const TensorView& mean, const TensorView& rstd) {
  constexpr std::string_view kernel = "layer_norm_forward";
  const cpu::LayerNormForward call =
      checked_forward(kernel, "x", x, weight, bias, epsilon, y, mean, rstd, stream.threads());
  dispatch(
      stream, kernel, meta::layer_norm_forward_cost(call.rows, call.columns, x.dtype),
      [call] { cpu::layer_norm_forward(call); },
      [&] { cuda::layer_norm_forward(stream, x, weight, bias, epsilon, y, mean, rstd); });
}

void residual_layer_norm_forward(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                                 const ConstTensorView& weight, const ConstTensorView& bias, float epsilon,
                                 const TensorView& residual, const TensorView& y, const TensorView& mean,
                                 const TensorView& rstd) {
  constexpr std::string_view kernel = "residual_layer_norm_forward";
  const cpu::LayerNormForward call =
      checked_forward(kernel, "residual", residual, weight, bias, epsilon, y, mean, rstd, stream.threads());
  for (const auto& [operand, view] :
       {std::pair<std::string_view, const ConstTensorView*>{"a", &a}, {"b", &b}}) {
    check_dtype(kernel, operand, view->dtype, {residual.dtype});
    check_elements(kernel, operand, view->elements(), residual.elements());
  }
  dispatch(
      stream, kernel, meta::residual_layer_norm_forward_cost(call.rows, call.columns, residual.dtype),
      [call, a, b, residual] {
        cpu::add(call.threads, a, b, residual);
        cpu::layer_norm_forward(call);
      },
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
  const std::int64_t columns = columns_of(kernel, "x", x);
  const std::int64_t rows = x.elements() / columns;
  check_tensor(kernel, "dy", dy, {x.dtype}, x.elements());
  check_tensor(kernel, "weight", weight, {x.dtype}, columns);
  check_tensor(kernel, "mean", mean, {DataType::float32}, rows);
  check_tensor(kernel, "rstd", rstd, {DataType::float32}, rows);
  check_tensor(kernel, "dx", dx, {x.dtype}, x.elements());
  check_tensor(kernel, "weight_gradient", weight_gradient, {DataType::float32}, columns);
  check_tensor(kernel, "bias_gradient", bias_gradient, {DataType::float32}, columns);
  const cpu::LayerNormBackward call{.rows = rows,
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
                                    .threads = stream.threads()};
  dispatch(
      stream, kernel, meta::layer_norm_backward_cost(rows, columns, x.dtype, accumulate_dx),
      [call] { cpu::layer_norm_backward(call); },
      [&] {
        check_workspace(kernel, workspace, 8 * columns);
        cuda::layer_norm_backward(stream, dy, x, weight, mean, rstd, accumulate_dx, dx, weight_gradient,
                                  bias_gradient, workspace);
      });
}

}  // namespace tranche::kernels
