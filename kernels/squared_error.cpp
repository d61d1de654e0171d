#include "tranche/kernels/squared_error.h"

#include "kernels/check.h"
#include "kernels/cpu/squared_error.h"
#include "kernels/cuda/squared_error.h"
#include "kernels/dispatch.h"
#include "kernels/meta/squared_error_cost.h"

namespace tranche::kernels {

namespace {

void check_pair(std::string_view kernel, std::string_view operand, const ConstTensorView& view,
                const ConstTensorView& target) {
  check_dtype(kernel, operand, view.dtype, {DataType::float32});
  check_dtype(kernel, "target", target.dtype, {DataType::float32});
  check_rank(kernel, "target", target.shape, 2);
  check_shape(kernel, operand, view.shape, target.shape);
}

}  // namespace

void squared_error(Stream& stream, const ConstTensorView& y, const ConstTensorView& target,
                   const TensorView& loss_sum, const TensorView& row_count) {
  constexpr std::string_view name = "squared_error";
  check_pair(name, "y", y, target);
  check_tensor(name, "loss_sum", loss_sum, {DataType::float64}, 1);
  check_tensor(name, "row_count", row_count, {DataType::int64}, 1);
  dispatch(
      stream, name, meta::squared_error(y),
      [y, target, loss_sum, row_count] { cpu::squared_error(y, target, loss_sum, row_count); },
      [&] { cuda::squared_error(stream, y, target, loss_sum, row_count); });
}

void squared_error_gradient(Stream& stream, const ConstTensorView& y, const ConstTensorView& target,
                            float scale, const TensorView& d_y) {
  constexpr std::string_view name = "squared_error_gradient";
  check_pair(name, "y", y, target);
  check_pair(name, "d_y", d_y, target);
  dispatch(
      stream, name, meta::squared_error_gradient(y),
      [y, target, scale, d_y] { cpu::squared_error_gradient(y, target, scale, d_y); },
      [&] { cuda::squared_error_gradient(stream, y, target, scale, d_y); });
}

}  // namespace tranche::kernels
