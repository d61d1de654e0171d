#pragma once
/// The arithmetic of cublasLtMatmul, on matrices in column-major order.

#include <cstdint>

namespace cuda_emulation {

enum class Element : std::uint8_t { fp32, bf16, fp16 };

struct Matrix {
  void* data = nullptr;
  Element element = Element::fp32;
  std::int64_t rows = 0, columns = 0;
  std::int64_t leading = 0;  // elements from one column to the next
  std::int64_t next = 0;     // elements from one matrix of the batch to the next
};

enum class Activation : std::uint8_t { none, relu, gelu, gelu_gradient };

struct ProductTask {
  Matrix a, b, c, d;  // d is m x n; c is read if beta is not 0
  bool transpose_a = false, transpose_b = false;
  std::int64_t k = 0;
  std::int64_t batch = 1;
  float alpha = 1, beta = 0;
  const float* alpha_on_device = nullptr;  // replaces alpha if not null
  const float* beta_on_device = nullptr;
  const void* bias = nullptr;  // m elements, added to each column
  Element bias_element = Element::fp32;
  std::int64_t bias_next = 0;
  void* bias_gradient = nullptr;  // sum of d's columns (m), of op(a)'s columns (m) or of op(b)'s rows (n)
  enum class Gradient : std::uint8_t { none, of_d, of_a, of_b } gradient = Gradient::none;
  Activation activation = Activation::none;
  Matrix auxiliary;  // input of the activation: gelu writes it if set, gelu's gradient reads it
};

/// Sums in fp32 with ascending k; each element of d is rounded once.
void compute_product(const ProductTask& task);

}  // namespace cuda_emulation
