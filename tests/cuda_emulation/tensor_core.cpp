// This file is compiled with full optimisation and without sanitizers: its operands are on the lanes' own
// stacks or, for ldmatrix, 16 aligned bytes each, and kernels of attention and GEMM spend most of their time
// here.
#include "tests/cuda_emulation/tensor_core.h"

#include <cstring>

#include "tranche/core/dtype.h"

namespace cuda_emulation {
namespace {

template <bool is_bfloat16>
float widen(std::uint16_t bits) {
  if constexpr (is_bfloat16) {
    return tranche::to_float(tranche::bfloat16{bits});
  } else {
    return tranche::to_float(tranche::float16{bits});
  }
}

// Lane 8i + j gives the address of row j of matrix i; lane l receives row l / 4, columns 2 (l % 4) and the
// next.
template <bool transposed>
void exchange(void* const (&payloads)[32]) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::uint16_t pair[2];
      for (int k = 0; k < 2; ++k) {
        const int row = transposed ? 2 * (lane % 4) + k : lane / 4;
        const int column = transposed ? lane / 4 : 2 * (lane % 4) + k;
        const unsigned char* source = static_cast<const LoadMatrix*>(payloads[8 * matrix + row])->row;
        std::memcpy(&pair[k], source + 2 * column, 2);
      }
      static_cast<const LoadMatrix*>(payloads[lane])->fragment[matrix] =
          pair[0] | static_cast<std::uint32_t>(pair[1]) << 16;
    }
  }
}

}  // namespace

void exchange_matrices(void* const (&payloads)[32], unsigned) {
  exchange<false>(payloads);
}

void exchange_transposed_matrices(void* const (&payloads)[32], unsigned) {
  exchange<true>(payloads);
}

template <bool is_bfloat16>
void exchange_products(void* const (&payloads)[32], unsigned) {
  float a[16][16], b[16][8];
  const auto low = [](std::uint32_t pair) { return static_cast<std::uint16_t>(pair & 0xffff); };
  const auto high = [](std::uint32_t pair) { return static_cast<std::uint16_t>(pair >> 16); };
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Multiply*>(payloads[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int part = 0; part < 4; ++part) {
      const int row = g + 8 * (part & 1), column = 2 * t + 8 * (part >> 1);
      a[row][column] = widen<is_bfloat16>(low(mine.a[part]));
      a[row][column + 1] = widen<is_bfloat16>(high(mine.a[part]));
    }
    for (int part = 0; part < 2; ++part) {
      b[2 * t + 8 * part][g] = widen<is_bfloat16>(low(mine.b[part]));
      b[2 * t + 8 * part + 1][g] = widen<is_bfloat16>(high(mine.b[part]));
    }
  }
  float d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Multiply*>(payloads[lane]);
    for (int i = 0; i < 4; ++i) d[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)] = mine.d[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Multiply*>(payloads[lane]);
    for (int i = 0; i < 4; ++i) mine.d[i] = d[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
  }
}

template void exchange_products<true>(void* const (&)[32], unsigned);
template void exchange_products<false>(void* const (&)[32], unsigned);

}  // namespace cuda_emulation
