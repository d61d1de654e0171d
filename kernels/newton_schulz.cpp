#include "tranche/kernels/newton_schulz.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/newton_schulz.h"
#include "kernels/cuda/newton_schulz.h"
#include "kernels/dispatch.h"
#include "kernels/meta/newton_schulz_cost.h"
#include "tranche/core/shape.h"
#include "tranche/kernels/matmul.h"

namespace tranche::kernels {

namespace {

constexpr std::string_view name = "newton_schulz";

/// The fp32 matrices of the iteration, one after the other.
struct Scratch {
  TensorView x, y;  ///< shaped like the block
  TensorView a, b;  ///< square, of its smaller extent
  std::int64_t bytes = 0;

  Scratch(std::int64_t rows, std::int64_t columns, void* memory) {
    const std::int64_t least = std::min(rows, columns);
    const auto take = [&](Shape shape) {
      void* const data = memory == nullptr ? nullptr : static_cast<std::byte*>(memory) + bytes;
      bytes += round_up(shape.elements() * size_of(DataType::float32), std::int64_t{64});
      return TensorView{data, DataType::float32, shape};
    };
    x = take({rows, columns});
    y = take({rows, columns});
    a = take({least, least});
    b = take({least, least});
  }
};

void scaled_sum(Stream& stream, double x_factor, const TensorView& x, double y_factor, const TensorView& y,
                const TensorView& out) {
  dispatch(
      stream, "newton_schulz_sum", meta::scaled_sum(out),
      [threads = stream.threads(), fx = static_cast<float>(x_factor), x, fy = static_cast<float>(y_factor), y,
       out] { cpu::scaled_sum(threads, fx, x, fy, y, out); },
      [&] {
        cuda::scaled_sum(stream, static_cast<float>(x_factor), x, static_cast<float>(y_factor), y, out);
      });
}

}  // namespace

void newton_schulz(Stream& stream, const NewtonSchulzOptions& options, const TensorView& matrix,
                   const MatrixBlock& block, const Workspace& scratch) {
  check_rank(name, "matrix", matrix.shape, 2);
  check_floating(name, "matrix", matrix.dtype);
  const auto within = [](std::int64_t first, std::int64_t count, std::int64_t extent) {
    return first >= 0 && count >= 1 && count <= extent - first;
  };
  if (!within(block.row, block.rows, matrix.shape[0]) ||
      !within(block.column, block.columns, matrix.shape[1])) {
    refuse(name, "the block does not lie within `matrix`, " + matrix.shape.to_string());
  }
  if (constexpr std::size_t most = cuda::newton_schulz_most_steps; options.steps.size() > most) {
    refuse(name, fmt::format("there are {} steps, wanted at most {}", options.steps.size(), most));
  }
  const Scratch of(block.rows, block.columns, scratch.data);
  if (scratch.bytes < of.bytes) {
    refuse(name, fmt::format("the scratch has {} bytes, wanted at least {}", scratch.bytes, of.bytes));
  }
  if (std::min(block.rows, block.columns) <= cpu::newton_schulz_few) {
    // With few singular values, one may lie where the polynomials are steep and amplify fp32 rounding, so
    // fp64 is used.
    dispatch(
        stream, "newton_schulz", meta::few_singular_values(matrix.dtype, block, options.steps.size()),
        [steps = std::vector(options.steps.begin(), options.steps.end()), factor = options.norm_factor,
         least = options.least_norm, scale = options.scale, matrix, block, x = of.x.data] {
          cpu::few_singular_values(steps, factor, least, scale, matrix, block, static_cast<double*>(x));
        },
        [&] {
          cuda::few_singular_values(stream, options.steps, options.norm_factor, options.least_norm,
                                    options.scale, matrix, block, static_cast<double*>(of.x.data));
        });
    return;
  }
  dispatch(
      stream, "newton_schulz_begin", meta::newton_schulz_begin(matrix.dtype, of.x),
      [threads = stream.threads(), matrix, block, factor = options.norm_factor, least = options.least_norm,
       x = of.x] { cpu::normalized_block(threads, matrix, block, factor, least, x.as<float>()); },
      [&] {
        cuda::normalized_block(stream, matrix, block, options.norm_factor, options.least_norm,
                               of.x.as<float>(), static_cast<double*>(of.y.data));
      });
  const bool wide = block.rows <= block.columns;
  for (const auto& [a, b, c] : options.steps) {
    matmul(stream, {.transpose_a = !wide, .transpose_b = wide}, of.x, of.x, of.a, {});
    matmul(stream, {}, of.a, of.a, of.b, {});
    scaled_sum(stream, b, of.a, c, of.b, of.b);
    matmul(stream, {}, wide ? of.b : of.x, wide ? of.x : of.b, of.y, {});
    scaled_sum(stream, a, of.x, 1, of.y, of.x);
  }
  dispatch(
      stream, "newton_schulz_end", meta::newton_schulz_end(matrix.dtype, of.x),
      [threads = stream.threads(), matrix, block, scale = static_cast<float>(options.scale), x = of.x] {
        cpu::store_block(threads, x.as<float>(), scale, matrix, block);
      },
      [&] { cuda::store_block(stream, of.x.as<float>(), static_cast<float>(options.scale), matrix, block); });
}

std::int64_t newton_schulz_scratch(std::int64_t rows, std::int64_t columns) {
  return Scratch(rows, columns, nullptr).bytes;
}

double newton_schulz_operations(std::int64_t rows, std::int64_t columns, int steps) {
  const auto least = static_cast<double>(std::min(rows, columns));
  const auto most = static_cast<double>(std::max(rows, columns));
  return steps * (4 * least * least * most + 2 * least * least * least);
}

}  // namespace tranche::kernels
