#include "kernels/cpu/newton_schulz.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/parallel.h"
#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

namespace {

template <class Call>
void with_storage(DataType dtype, const Call& call) {
  switch (dtype) {
    case DataType::bfloat16:
      return call(bfloat16{});
    case DataType::float16:
      return call(float16{});
    default:
      return call(float{});
  }
}

/// Calls body(row of the block, its first element in the matrix) for all rows.
template <class Body>
void for_each_row(int threads, const ConstTensorView& matrix, const MatrixBlock& block, const Body& body) {
  parallel_ranges(threads, block.rows, row_grain(block.columns), [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t row = first; row < first + count; ++row) {
      body(row, (block.row + row) * matrix.shape[1] + block.column);
    }
  });
}

}  // namespace

void normalized_block(int threads, const ConstTensorView& matrix, const MatrixBlock& block, double factor,
                      double least, float* x) {
  with_storage(matrix.dtype, [&](auto value) {
    const auto* const from = matrix.as<decltype(value)>();
    // One thread computes this: the GEMMs after it take a thousand times as long.
    double squares = 0;
    for (std::int64_t row = 0; row < block.rows; ++row) {
      const auto* const elements = from + (block.row + row) * matrix.shape[1] + block.column;
      double of_row = 0;
      for (std::int64_t i = 0; i < block.columns; ++i) {
        const auto element = static_cast<double>(to_float(elements[i]));
        of_row += element * element;
      }
      squares += of_row;
    }
    const auto inverse = static_cast<float>(1 / std::max(factor * std::sqrt(squares), least));
    for_each_row(threads, matrix, block, [&](std::int64_t row, std::int64_t first) {
      for (std::int64_t i = 0; i < block.columns; ++i) {
        x[row * block.columns + i] = to_float(from[first + i]) * inverse;
      }
    });
  });
}

void store_block(int threads, const float* x, float scale, const TensorView& matrix,
                 const MatrixBlock& block) {
  with_storage(matrix.dtype, [&](auto value) {
    using T = decltype(value);
    auto* const to = matrix.as<T>();
    for_each_row(threads, matrix, block, [&](std::int64_t row, std::int64_t first) {
      for (std::int64_t i = 0; i < block.columns; ++i) {
        to[first + i] = from_float<T>(scale * x[row * block.columns + i]);
      }
    });
  });
}

void scaled_sum(int threads, float x_factor, const TensorView& x, float y_factor, const TensorView& y,
                const TensorView& out) {
  const auto* const xs = x.as<float>();
  const auto* const ys = y.as<float>();
  auto* const to = out.as<float>();
  parallel_ranges(threads, out.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t i = first; i < first + count; ++i) to[i] = x_factor * xs[i] + y_factor * ys[i];
  });
}

void few_singular_values(std::span<const NewtonSchulzStep> steps, double factor, double least, double scale,
                         const TensorView& matrix, const MatrixBlock& block, double* x) {
  const bool wide = block.rows <= block.columns;
  const std::int64_t few = wide ? block.rows : block.columns, many = wide ? block.columns : block.rows;
  with_storage(matrix.dtype, [&](auto value) {
    using T = decltype(value);
    auto* const elements = matrix.as<T>() + block.row * matrix.shape[1] + block.column;
    const std::int64_t across = wide ? matrix.shape[1] : 1, along = wide ? 1 : matrix.shape[1];
    double squares = 0;
    for (std::int64_t i = 0; i < few; ++i) {
      for (std::int64_t j = 0; j < many; ++j) {
        const double element = to_float(elements[i * across + j * along]);
        x[i * many + j] = element;
        squares += element * element;
      }
    }
    const double inverse = 1 / std::max(factor * std::sqrt(squares), least);
    for (std::int64_t i = 0; i < few * many; ++i) x[i] *= inverse;
    constexpr std::int64_t most = newton_schulz_few;
    for (const auto& [a, b, c] : steps) {
      double gram[most][most] = {}, factors[most][most];
      for (std::int64_t i = 0; i < few; ++i) {
        for (std::int64_t k = 0; k < few; ++k) {
          for (std::int64_t j = 0; j < many; ++j) gram[i][k] += x[i * many + j] * x[k * many + j];
        }
      }
      for (std::int64_t i = 0; i < few; ++i) {
        for (std::int64_t k = 0; k < few; ++k) {
          double square = 0;
          for (std::int64_t l = 0; l < few; ++l) square += gram[i][l] * gram[l][k];
          factors[i][k] = (i == k ? a : 0) + b * gram[i][k] + c * square;
        }
      }
      for (std::int64_t j = 0; j < many; ++j) {
        double column[most] = {};
        for (std::int64_t i = 0; i < few; ++i) {
          for (std::int64_t k = 0; k < few; ++k) column[i] += factors[i][k] * x[k * many + j];
        }
        for (std::int64_t i = 0; i < few; ++i) x[i * many + j] = column[i];
      }
    }
    for (std::int64_t i = 0; i < few; ++i) {
      for (std::int64_t j = 0; j < many; ++j) {
        elements[i * across + j * along] = from_float<T>(static_cast<float>(scale * x[i * many + j]));
      }
    }
  });
}

}  // namespace tranche::kernels::cpu
