#include "tranche/kernels/rope.h"

#include <fmt/core.h>

#include <cmath>
#include <numbers>
#include <string_view>

#include "kernels/check.h"
#include "kernels/cpu/rope.h"
#include "kernels/cuda/rope.h"
#include "kernels/dispatch.h"
#include "kernels/meta/rope_cost.h"

namespace tranche::kernels {

namespace {

void check_scaling(std::string_view kernel, const RopeScaling& scaling) {
  if (scaling.kind == RopeScaling::Kind::none) return;
  if (!(scaling.factor > 0)) refuse(kernel, fmt::format("factor is {}, wanted above 0", scaling.factor));
  if (scaling.kind != RopeScaling::Kind::llama3) return;
  if (!(scaling.low_frequency_factor > 0 && scaling.low_frequency_factor < scaling.high_frequency_factor)) {
    refuse(kernel,
           fmt::format("low_frequency_factor is {} and high_frequency_factor {}, wanted 0 < low < high",
                       scaling.low_frequency_factor, scaling.high_frequency_factor));
  }
  if (scaling.original_positions < 1) {
    refuse(kernel, fmt::format("original_positions is {}, wanted at least 1", scaling.original_positions));
  }
}

/// Follows _compute_llama3_parameters() in transformers' modeling_rope_utils.py. There a Python number
/// combined with an fp32 tensor is rounded to fp32, and number / tensor is computed as the tensor's
/// reciprocal times the number.
float llama3_frequency(float frequency, const RopeScaling& scaling) {
  const auto positions = static_cast<double>(scaling.original_positions);
  const auto factor = static_cast<float>(scaling.factor);
  const auto low = static_cast<float>(scaling.low_frequency_factor);
  const float wave = 1.0f / frequency * static_cast<float>(2 * std::numbers::pi);
  if (wave > static_cast<float>(positions / scaling.low_frequency_factor)) return frequency / factor;
  if (wave < static_cast<float>(positions / scaling.high_frequency_factor)) return frequency;
  const float smooth = (1.0f / wave * static_cast<float>(positions) - low) /
                       static_cast<float>(scaling.high_frequency_factor - scaling.low_frequency_factor);
  return (1.0f - smooth) * frequency / factor + smooth * frequency;
}

}  // namespace

std::vector<float> rope_frequencies(std::int64_t rotary_width, double theta, const RopeScaling& scaling) {
  constexpr std::string_view kernel = "rope_frequencies";
  if (rotary_width < 2 || rotary_width % 2 != 0) {
    refuse(kernel, fmt::format("rotary_width is {}, wanted an even number from 2 on", rotary_width));
  }
  if (!(theta > 0)) refuse(kernel, fmt::format("theta is {}, wanted above 0", theta));
  check_scaling(kernel, scaling);
  std::vector<float> frequencies;
  for (std::int64_t i = 0; i < rotary_width; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(rotary_width);
    const double base = static_cast<float>(theta);
    float frequency = 1.0f / static_cast<float>(std::pow(base, static_cast<double>(exponent)));
    if (scaling.kind == RopeScaling::Kind::linear) frequency /= static_cast<float>(scaling.factor);
    if (scaling.kind == RopeScaling::Kind::llama3) frequency = llama3_frequency(frequency, scaling);
    frequencies.push_back(frequency);
  }
  return frequencies;
}

void rope_table(Stream& stream, std::span<const float> frequencies, const ConstTensorView& positions,
                std::int64_t time, const TensorView& table, std::int64_t first_position) {
  constexpr std::string_view kernel = "rope_table";
  check_dtype(kernel, "table", table.dtype, {DataType::float32});
  check_rank(kernel, "table", table.shape, 2);
  const std::int64_t rows = table.shape[0];
  check_shape(kernel, "table", table.shape, {rows, 2 * static_cast<std::int64_t>(frequencies.size())});
  if (is_given(positions)) {
    check_tensor(kernel, "positions", positions, {DataType::int32}, rows);
  } else if (time < 1) {
    refuse(kernel, fmt::format("time is {}, wanted at least 1 where there are no positions", time));
  }
  if (first_position < 0) {
    refuse(kernel, fmt::format("first_position is {}, wanted at least 0", first_position));
  }
  const auto* given = static_cast<const std::int32_t*>(positions.data);
  dispatch(
      stream, kernel, meta::rope_table_cost(table, positions),
      [call = cpu::RopeTable{.frequencies = {frequencies.begin(), frequencies.end()},
                             .positions = is_given(positions) ? given : nullptr,
                             .time = time,
                             .first_position = first_position,
                             .rows = rows,
                             .table = table.as<float>(),
                             .threads = stream.threads()}] { cpu::rope_table(call); },
      [&] { cuda::rope_table(stream, frequencies, positions, time, table, first_position); });
}

void rope(Stream& stream, bool inverse, const ConstTensorView& table, std::int64_t heads,
          std::int64_t head_dim, const TensorView& x) {
  constexpr std::string_view kernel = "rope";
  check_floating(kernel, "x", x.dtype);
  check_dtype(kernel, "table", table.dtype, {DataType::float32});
  check_rank(kernel, "table", table.shape, 2);
  const std::int64_t rows = table.shape[0], width = table.shape[1];
  if (width % 2 != 0 || width > head_dim) {
    refuse(kernel, fmt::format("`table` has shape {}, wanted an even number of columns up to head_dim, {}",
                               table.shape.to_string(), head_dim));
  }
  check_elements(kernel, "x", x.elements(), checked_multiply(checked_multiply(rows, heads), head_dim));
  const cpu::Rope call{.inverse = inverse,
                       .rows = rows,
                       .heads = heads,
                       .head_dim = head_dim,
                       .width = width,
                       .dtype = x.dtype,
                       .table = table.as<float>(),
                       .x = x.data,
                       .threads = stream.threads()};
  dispatch(
      stream, kernel, meta::rope_cost(table, heads, x.dtype), [call] { cpu::rope(call); },
      [&] { cuda::rope(stream, inverse, table, heads, head_dim, x); });
}

}  // namespace tranche::kernels
