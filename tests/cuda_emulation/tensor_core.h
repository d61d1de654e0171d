#pragma once
/// ldmatrix and mma: the inputs of each lane, and the exchange when all lanes have arrived.

#include <cstdint>

namespace cuda_emulation {

struct LoadMatrix {
  const unsigned char* row;
  std::uint32_t* fragment;
};
void exchange_matrices(void* const (&payloads)[32], unsigned mask);
void exchange_transposed_matrices(void* const (&payloads)[32], unsigned mask);

struct Multiply {
  float* d;
  const std::uint32_t* a;
  std::uint32_t b[2];
};
/// Multiplies bf16, or else fp16.
template <bool is_bfloat16>
void exchange_products(void* const (&payloads)[32], unsigned mask);

}  // namespace cuda_emulation
