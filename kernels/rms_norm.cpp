#include "tranche/kernels/rms_norm.h"

#include <string_view>
#include <utility>

#include "kernels/check.h"
#include "kernels/cpu/norm.h"
#include "kernels/cuda/norm.h"
#include "kernels/dispatch.h"
#include "kernels/meta/norm_cost.h"

namespace tranche::kernels {

namespace {

cpu::NormForward checked_forward(std::string_view kernel, std::string_view x_name, const ConstTensorView& x,
                                 const ConstTensorView& weight, float epsilon, const TensorView& out,
                                 const TensorView& rstd, int threads) {
  check_floating(kernel, x_name, x.dtype);
  const auto [rows, columns] = check_rows(kernel, x_name, x);
  check_tensor(kernel, "weight", weight, {x.dtype}, columns);
  check_tensor(kernel, "out", out, {x.dtype}, x.elements());
  check_tensor(kernel, "rstd", rstd, {DataType::float32}, rows);
  return {.rows = rows,
          .columns = columns,
          .dtype = x.dtype,
          .x = x.data,
          .weight = weight.data,
          .epsilon = epsilon,
          .y = out.data,
          .rstd = rstd.as<float>(),
          .threads = threads};
}

}  // namespace

void rms_norm_forward(Stream& stream, const ConstTensorView& x, const ConstTensorView& weight, float epsilon,
                      const TensorView& out, const TensorView& rstd) {
  constexpr std::string_view kernel = "rms_norm_forward";
  const cpu::NormForward call = checked_forward(kernel, "x", x, weight, epsilon, out, rstd, stream.threads());
  dispatch(
      stream, kernel, meta::rms_norm_forward_cost(call.rows, call.columns, x.dtype),
      [call] { cpu::norm_forward(call); },
      [&] { cuda::rms_norm_forward(stream, x, weight, epsilon, out, rstd); });
}

void residual_rms_norm_forward(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                               const ConstTensorView& weight, float epsilon, const TensorView& sum,
                               const TensorView& out, const TensorView& rstd) {
  constexpr std::string_view kernel = "residual_rms_norm_forward";
  cpu::NormForward call = checked_forward(kernel, "sum", sum, weight, epsilon, out, rstd, stream.threads());
  check_tensor(kernel, "a", a, {sum.dtype}, sum.elements());
  check_tensor(kernel, "b", b, {sum.dtype}, sum.elements());
  call.x = a.data;
  call.addend = b.data;
  call.sum = sum.data;
  dispatch(
      stream, kernel,
      meta::residual_norm_cost(meta::rms_norm_forward_cost(call.rows, call.columns, sum.dtype), sum),
      [call] { cpu::norm_forward(call); },
      [&] { cuda::residual_rms_norm_forward(stream, a, b, weight, epsilon, sum, out, rstd); });
}

void rms_norm_backward(Stream& stream, const ConstTensorView& d_out, const ConstTensorView& x,
                       const ConstTensorView& weight, const ConstTensorView& rstd, bool accumulate,
                       const TensorView& d_x, const TensorView& weight_gradient, const Workspace& workspace) {
  constexpr std::string_view kernel = "rms_norm_backward";
  check_floating(kernel, "x", x.dtype);
  const auto [rows, columns] = check_rows(kernel, "x", x);
  check_tensor(kernel, "d_out", d_out, {x.dtype}, x.elements());
  check_tensor(kernel, "weight", weight, {x.dtype}, columns);
  check_tensor(kernel, "rstd", rstd, {DataType::float32}, rows);
  check_tensor(kernel, "d_x", d_x, {x.dtype}, x.elements());
  check_tensor(kernel, "weight_gradient", weight_gradient, {DataType::float32}, columns);
  const cpu::NormBackward call{.rows = rows,
                               .columns = columns,
                               .dtype = x.dtype,
                               .dy = d_out.data,
                               .x = x.data,
                               .weight = weight.data,
                               .rstd = rstd.as<float>(),
                               .accumulate_dx = accumulate,
                               .dx = d_x.data,
                               .weight_gradient = weight_gradient.as<float>(),
                               .workspace = workspace,
                               .threads = stream.threads()};
  dispatch(
      stream, kernel, meta::rms_norm_backward_cost(rows, columns, x.dtype, accumulate),
      [call] { cpu::norm_backward(call); },
      [&] {
        check_workspace(kernel, workspace, 4 * call.columns);
        cuda::rms_norm_backward(stream, d_out, x, weight, rstd, accumulate, d_x, weight_gradient, workspace);
      });
}

}  // namespace tranche::kernels
