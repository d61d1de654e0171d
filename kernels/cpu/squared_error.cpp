#include "kernels/cpu/squared_error.h"

namespace tranche::kernels::cpu {

void squared_error(const ConstTensorView& y, const ConstTensorView& target, const TensorView& loss_sum,
                   const TensorView& row_count) {
  const auto* output = y.as<float>();
  const auto* wanted = target.as<float>();
  const std::int64_t rows = y.shape[0], columns = y.shape[1];
  double total = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    double row = 0;
    for (std::int64_t c = 0; c < columns; ++c) {
      const double difference = double{output[r * columns + c]} - double{wanted[r * columns + c]};
      row += difference * difference;
    }
    total += row / static_cast<double>(columns);
  }
  *loss_sum.as<double>() += total;
  *row_count.as<std::int64_t>() += rows;
}

void squared_error_gradient(const ConstTensorView& y, const ConstTensorView& target, float scale,
                            const TensorView& d_y) {
  const auto* output = y.as<float>();
  const auto* wanted = target.as<float>();
  auto* gradient = d_y.as<float>();
  const float factor = 2.0f * scale / static_cast<float>(y.shape[1]);
  for (std::int64_t i = 0; i < y.elements(); ++i) gradient[i] = factor * (output[i] - wanted[i]);
}

}  // namespace tranche::kernels::cpu
