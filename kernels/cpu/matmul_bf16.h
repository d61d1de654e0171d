#pragma once
/// bf16 GEMM by the CPU's own dot-product instruction (AVX512_BF16). Both operands are packed block by block
/// as they are needed, in memory that stays in the core's own cache.

#include "kernels/cpu/matmul.h"
#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

/// True when a call is computed here: bf16, the CPU's bf16 tiles are fast (bf16_tile.h), k from 1 to 65536,
/// and even where b is transposed.
bool bf16_gemm_takes(const MatmulCall& call);

/// Computes a call that bf16_gemm_takes(). Every element is one fp32 sum over ascending depth, started at
/// zero and added to c at the end if the call accumulates: neither the number of threads nor the workspace
/// nor the other rows and columns of c change a bit. With `bias` [n] (bf16, c_dtype bf16, not accumulating)
/// the sum is rounded, the bias added and the sum rounded again, as add_bias does.
void bf16_matmul(const MatmulCall& call, const bfloat16* bias = nullptr);

}  // namespace tranche::kernels::cpu
