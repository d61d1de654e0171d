#pragma once
/// GEMMs through oneDNN; only this file knows its interface. Builds with TRANCHE_PLAIN_KERNELS replace the
/// source by one that does nothing.

#include <string>
#include <string_view>

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/sgemm.h"

namespace tranche::kernels::cpu {

/// Runs a bf16 call with m, n, k > 0. Returns false, having done nothing, when this CPU (as limited by
/// ONEDNN_MAX_CPU_ISA) has no bf16 instructions, m or n is below 16 or k no multiple of 32 (which oneDNN's
/// matrix-unit kernels get wrong), oneDNN has no such primitive, or its scratchpad exceeds the workspace.
bool onednn_matmul(const MatmulCall& call);

/// True when a bf16 GEMM is faster on this CPU than the same GEMM widened to fp32. It is not on Intel's cores
/// from Sapphire Rapids on if their matrix unit (AMX) is hidden, for example by a hypervisor: the remaining
/// instruction, vdpbf16ps, runs at half the rate of fp32 there (86 against 180 GFLOP/s measured on one core).
bool onednn_bf16_is_fast();

/// True when oneDNN has its own fp32 kernels for this CPU (x86 with AVX2 or better, as limited by
/// ONEDNN_MAX_CPU_ISA).
bool onednn_has_sgemm();
/// True when they use AVX-512.
bool onednn_has_wide_sgemm();
/// sgemm() on the calling thread, with m, n, k > 0.
void onednn_sgemm(const SgemmArguments& arguments);

/// "oneDNN bf16 (avx512_core_bf16)"; empty when the CPU has no bf16 instructions.
std::string_view onednn_bf16_path();
/// "oneDNN 2.6.3 (avx512_core_bf16)"; empty in builds without it.
std::string onednn_library();

}  // namespace tranche::kernels::cpu
