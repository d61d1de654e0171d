#include "kernels/cuda/launch.h"
#include "kernels/cuda/simt.h"
#include "tensor_core.h"

namespace tranche::gpu_probe {
namespace {

using namespace kernels::cuda;

template <class T>
__global__ void use_each_instruction(const WarpInput* input, WarpOutput* output) {
  __shared__ __align__(16) std::uint16_t left[16][16];
  __shared__ __align__(16) std::uint16_t right[16][16];
  __shared__ __align__(16) std::uint16_t holes[16][16];
  const int lane = static_cast<int>(threadIdx.x);
  cp_async_16(&left[0][0] + 8 * lane, &input->left[0][0] + 8 * lane);
  cp_async_16(&right[0][0] + 8 * lane, &input->right[0][0] + 8 * lane);
  cp_async_commit();
  cp_async_16(&holes[0][0] + 8 * lane, &input->left[0][0] + 8 * lane, lane % 3 != 0);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  std::uint32_t a[4], b[4], t[4];
  load_matrix_x4<false>(a, &left[lane % 16][lane / 16 * 8]);
  load_matrix_x4<false>(b, &right[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
  load_matrix_x4<true>(t, &right[lane % 16][lane / 16 * 8]);
  for (int i = 0; i < 4; ++i) {
    output->left[lane][i] = a[i];
    output->right[lane][i] = b[i];
    output->transposed[lane][i] = t[i];
  }
  for (int part = 0; part < 4; ++part) {
    const bool upper = part % 2 == 1;
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = start_of(lane, i);
    if (part < 2) {
      multiply_accumulate_16x8x16<T>(d, a, upper ? b[2] : b[0], upper ? b[3] : b[1]);
    } else {
      multiply_accumulate_16x8x16<T>(d, a, upper ? t[2] : t[0], upper ? t[3] : t[1]);
    }
    for (int i = 0; i < 4; ++i) output->products[part][lane][i] = d[i];
  }
  cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 8; ++i) (&output->holes[0][0])[8 * lane + i] = (&holes[0][0])[8 * lane + i];
  output->packed[lane] = pack_two<T>(input->pairs[lane][0], input->pairs[lane][1]);
  output->powers[lane] = exponential_of_two(input->exponents[lane]);
}

}  // namespace

void run_warp(Stream& stream, bool is_bfloat16, const WarpInput* input, WarpOutput* output) {
  LaunchShape shape;
  shape.block = warp_size;
  if (is_bfloat16) {
    launch(stream, "use_each_instruction", use_each_instruction<bfloat16>, shape, input, output);
  } else {
    launch(stream, "use_each_instruction", use_each_instruction<float16>, shape, input, output);
  }
}

}  // namespace tranche::gpu_probe
