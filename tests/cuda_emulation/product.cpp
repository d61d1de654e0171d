// This file is compiled with full optimisation and without sanitizers: the ranges have been checked, and it
// does most of the work.
#include "tests/cuda_emulation/product.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "tranche/core/dtype.h"

namespace cuda_emulation {
namespace {

std::int64_t bytes_of(Element element) {
  return element == Element::fp32 ? 4 : 2;
}

float load(const void* data, Element element, std::int64_t index) {
  switch (element) {
    case Element::bf16:
      return tranche::to_float(static_cast<const tranche::bfloat16*>(data)[index]);
    case Element::fp16:
      return tranche::to_float(static_cast<const tranche::float16*>(data)[index]);
    case Element::fp32:
      break;
  }
  return static_cast<const float*>(data)[index];
}

void store(void* data, Element element, std::int64_t index, float value) {
  switch (element) {
    case Element::bf16:
      static_cast<tranche::bfloat16*>(data)[index] = tranche::to_bfloat16(value);
      return;
    case Element::fp16:
      static_cast<tranche::float16*>(data)[index] = tranche::to_float16(value);
      return;
    case Element::fp32:
      static_cast<float*>(data)[index] = value;
  }
}

Matrix of_batch(Matrix matrix, std::int64_t index) {
  if (matrix.data != nullptr) {
    matrix.data = static_cast<unsigned char*>(matrix.data) + index * matrix.next * bytes_of(matrix.element);
  }
  return matrix;
}

/// op(matrix) in fp32, stored as `outer` groups of `inner` adjacent elements: element i of group o is row i,
/// column o of op(matrix), or the reverse.
std::vector<float> widen(const Matrix& matrix, bool rows_are_neighbours) {
  std::vector<float> out(static_cast<std::size_t>(matrix.rows * matrix.columns));
  for (std::int64_t column = 0; column < matrix.columns; ++column) {
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
      const std::int64_t to =
          rows_are_neighbours ? column * matrix.rows + row : row * matrix.columns + column;
      out[static_cast<std::size_t>(to)] = load(matrix.data, matrix.element, column * matrix.leading + row);
    }
  }
  return out;
}

constexpr std::int64_t rows_at_once = 64, columns_at_once = 4;

/// sums[j][i] = sum over p of a[p * m + i] b[p * n + j], for a block of at most 64 x 4.
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void block_product(const float* a, const float* b, std::int64_t m, std::int64_t n, std::int64_t k, float* sums) {
  float local[columns_at_once][rows_at_once] = {};
  for (std::int64_t p = 0; p < k; ++p) {
    const float* column = a + p * m;
    for (std::int64_t j = 0; j < columns_at_once; ++j) {
      const float factor = b[p * n + j];
      for (std::int64_t i = 0; i < rows_at_once; ++i) local[j][i] += column[i] * factor;
    }
  }
  std::copy(&local[0][0], &local[0][0] + columns_at_once * rows_at_once, sums);
}

void edge_product(const float* a, const float* b, std::int64_t m, std::int64_t n, std::int64_t k,
                  std::int64_t rows, std::int64_t columns, float* sums) {
  for (std::int64_t j = 0; j < columns; ++j) {
    for (std::int64_t i = 0; i < rows; ++i) {
      float sum = 0;
      for (std::int64_t p = 0; p < k; ++p) sum += a[p * m + i] * b[p * n + j];
      sums[j * rows_at_once + i] = sum;
    }
  }
}

constexpr float gelu_scale = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float gelu_cubic = 0.044715f;

float gelu(float x) {
  return 0.5f * x * (1.0f + std::tanh(gelu_scale * (x + gelu_cubic * x * x * x)));
}

float gelu_slope(float x) {
  const float t = std::tanh(gelu_scale * (x + gelu_cubic * x * x * x));
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * gelu_scale * (1.0f + 3.0f * gelu_cubic * x * x);
}

void compute_one(const ProductTask& task, std::int64_t index, float alpha, float beta) {
  const Matrix d = of_batch(task.d, index), c = of_batch(task.c, index),
               aux = of_batch(task.auxiliary, index);
  const std::int64_t m = d.rows, n = d.columns, k = task.k;
  // In a the rows of op(a) are adjacent, in b the columns of op(b).
  const std::vector<float> a = widen(of_batch(task.a, index), !task.transpose_a);
  const std::vector<float> b = widen(of_batch(task.b, index), task.transpose_b);
  std::vector<float> gradient;
  const std::int64_t gradient_length = task.gradient == ProductTask::Gradient::of_b ? n : m;
  if (task.gradient != ProductTask::Gradient::none)
    gradient.assign(static_cast<std::size_t>(gradient_length), 0);
  if (task.gradient == ProductTask::Gradient::of_a || task.gradient == ProductTask::Gradient::of_b) {
    const std::vector<float>& from = task.gradient == ProductTask::Gradient::of_a ? a : b;
    for (std::int64_t p = 0; p < k; ++p) {
      for (std::int64_t i = 0; i < gradient_length; ++i) {
        gradient[static_cast<std::size_t>(i)] += from[static_cast<std::size_t>(p * gradient_length + i)];
      }
    }
  }
  float sums[columns_at_once * rows_at_once];
  for (std::int64_t j0 = 0; j0 < n; j0 += columns_at_once) {
    for (std::int64_t i0 = 0; i0 < m; i0 += rows_at_once) {
      const std::int64_t rows = std::min(rows_at_once, m - i0), columns = std::min(columns_at_once, n - j0);
      if (rows == rows_at_once && columns == columns_at_once) {
        block_product(a.data() + i0, b.data() + j0, m, n, k, sums);
      } else {
        edge_product(a.data() + i0, b.data() + j0, m, n, k, rows, columns, sums);
      }
      for (std::int64_t j = j0; j < j0 + columns; ++j) {
        for (std::int64_t i = i0; i < i0 + rows; ++i) {
          float value = alpha * sums[(j - j0) * rows_at_once + (i - i0)];
          if (beta != 0) value += beta * load(c.data, c.element, j * c.leading + i);
          if (task.bias != nullptr) value += load(task.bias, task.bias_element, index * task.bias_next + i);
          switch (task.activation) {
            case Activation::none:
              break;
            case Activation::relu:
              value = std::max(value, 0.0f);
              break;
            case Activation::gelu:
              if (aux.data != nullptr) store(aux.data, aux.element, j * aux.leading + i, value);
              value = gelu(value);
              break;
            case Activation::gelu_gradient:
              value *= gelu_slope(load(aux.data, aux.element, j * aux.leading + i));
              break;
          }
          if (task.gradient == ProductTask::Gradient::of_d) gradient[static_cast<std::size_t>(i)] += value;
          store(d.data, d.element, j * d.leading + i, value);
        }
      }
    }
  }
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(gradient.size()); ++i) {
    store(task.bias_gradient, task.bias_element, index * task.bias_next + i,
          gradient[static_cast<std::size_t>(i)]);
  }
}

}  // namespace

void compute_product(const ProductTask& task) {
  const float alpha = task.alpha_on_device != nullptr ? *task.alpha_on_device : task.alpha;
  const float beta = task.beta_on_device != nullptr ? *task.beta_on_device : task.beta;
  for (std::int64_t index = 0; index < task.batch; ++index) compute_one(task, index, alpha, beta);
}

}  // namespace cuda_emulation
