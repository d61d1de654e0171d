#pragma once
/// Runs one warp through every instruction that kernels write in PTX (kernels/cuda/simt.h), and returns the
/// results of its lanes.

#include <cstdint>

#include "tranche/device/stream.h"

namespace tranche::gpu_probe {

struct alignas(16) WarpInput {
  std::uint16_t left[16][16];   ///< rows x depth
  std::uint16_t right[16][16];  ///< columns x depth, or depth x columns where transposed
  float pairs[32][2];
  float exponents[32];
};
struct alignas(16) WarpOutput {
  std::uint16_t holes[16][16];  ///< `left` copied by cp.async, without the 16 bytes of every third lane
  std::uint32_t left[32][4];    ///< fragments loaded by ldmatrix
  std::uint32_t right[32][4];
  std::uint32_t transposed[32][4];
  float products[4][32][4];  ///< mma: columns 0-7 and 8-15 of left right^T, then of left right
  std::uint32_t packed[32];
  float powers[32];
};
/// The initial value of the accumulators.
constexpr float start_of(int lane, int i) {
  return static_cast<float>(4 * lane + i);
}

/// Elements are bf16, or else fp16. Both structures must be in memory of the stream's device.
void run_warp(Stream& stream, bool is_bfloat16, const WarpInput* input, WarpOutput* output);

}  // namespace tranche::gpu_probe
