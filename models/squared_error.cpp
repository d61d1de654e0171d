#include "tranche/models/squared_error.h"

#include <fmt/core.h>

#include "tranche/core/error.h"

namespace tranche::models {

namespace {

void require_pair(const ConstTensorView& y, const ConstTensorView& target) {
  if (y.shape.rank() == 2 && y.shape == target.shape && y.dtype == DataType::float32 &&
      target.dtype == DataType::float32) {
    return;
  }
  throw InvalidArgument(
      fmt::format("squared error wants outputs and targets of one fp32 shape [rows, columns], "
                  "not {} {} and {} {}",
                  name_of(y.dtype), y.shape.to_string(), name_of(target.dtype), target.shape.to_string()));
}

}  // namespace

void squared_error(Stream& stream, const ConstTensorView& y, const ConstTensorView& target,
                   const TensorView& loss_sum, const TensorView& row_count) {
  require_pair(y, target);
  stream.count(3.0 * static_cast<double>(y.elements()), 2.0 * static_cast<double>(y.bytes()), 16);
  stream.enqueue("squared_error", [=] {
    const auto* output = y.as<float>();
    const auto* wanted = target.as<float>();
    const std::int64_t rows = y.shape[0], columns = y.shape[1];
    double total = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      double row = 0;
      for (std::int64_t c = 0; c < columns; ++c) {
        const double difference = double{output[r * columns + c]} - wanted[r * columns + c];
        row += difference * difference;
      }
      total += row / static_cast<double>(columns);
    }
    *loss_sum.as<double>() += total;
    *row_count.as<std::int64_t>() += rows;
  });
}

void squared_error_gradient(Stream& stream, const ConstTensorView& y, const ConstTensorView& target,
                            float scale, const TensorView& d_y) {
  require_pair(y, target);
  require_pair(d_y, target);
  stream.count(2.0 * static_cast<double>(y.elements()), 2.0 * static_cast<double>(y.bytes()),
               static_cast<double>(d_y.bytes()));
  stream.enqueue("squared_error_gradient", [=] {
    const auto* output = y.as<float>();
    const auto* wanted = target.as<float>();
    auto* gradient = d_y.as<float>();
    const float factor = 2.0f * scale / static_cast<float>(y.shape[1]);
    for (std::int64_t i = 0; i < y.elements(); ++i) gradient[i] = factor * (output[i] - wanted[i]);
  });
}

}  // namespace tranche::models
