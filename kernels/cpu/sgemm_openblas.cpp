#include <cblas.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "kernels/cpu/matmul_onednn.h"
#include "kernels/cpu/sgemm.h"
#include "tranche/core/shape.h"

namespace tranche::kernels::cpu {

namespace {

/// Our threads call OpenBLAS each for its own tile, so OpenBLAS itself is kept to the calling thread: its
/// thread count is one number for the whole process and would otherwise make ranks that share a process
/// depend on each other.
void keep_to_calling_thread() {
  if (openblas_get_num_threads() == 1) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (openblas_get_num_threads() != 1) openblas_set_num_threads(1);
}

/// oneDNN's sgemm writes its kernels for what the CPU can do. With AVX-512 it is the faster one at every size
/// of tile (4 to 28 % on Zen 4, bench/results/2026-11-22-step-speed.md). Without, OpenBLAS is, unless it
/// does not know the CPU: it picks kernels by the model number, and those of 2004 (SSE3) on models newer than
/// itself, a fifth of the speed or less.
bool openblas_is_faster() {
  static const bool faster = [] {
    if (onednn_has_wide_sgemm()) return false;
    constexpr std::array<std::string_view, 5> modern{"Haswell", "Zen", "SkylakeX", "Cooperlake",
                                                     "SapphireRapids"};
    const std::string_view core = openblas_get_corename();
    return !onednn_has_sgemm() || std::find(modern.begin(), modern.end(), core) != modern.end();
  }();
  return faster;
}

}  // namespace

void sgemm(const SgemmArguments& arguments) {
  if (arguments.m == 0 || arguments.n == 0) return;
  if (!openblas_is_faster() && arguments.k > 0) return onednn_sgemm(arguments);
  keep_to_calling_thread();
  cblas_sgemm(CblasRowMajor, arguments.transpose_a ? CblasTrans : CblasNoTrans,
              arguments.transpose_b ? CblasTrans : CblasNoTrans, narrow<blasint>(arguments.m),
              narrow<blasint>(arguments.n), narrow<blasint>(arguments.k), arguments.alpha, arguments.a,
              narrow<blasint>(arguments.stride_a), arguments.b, narrow<blasint>(arguments.stride_b),
              arguments.beta, arguments.c, narrow<blasint>(arguments.stride_c));
}

std::string_view sgemm_path() {
  return openblas_is_faster() ? "OpenBLAS sgemm" : "oneDNN sgemm";
}

std::string sgemm_library() {
  // OpenBLAS writes its answer into one buffer of the process: asked once, not by every rank's thread at a
  // time.
  static const std::string text = std::string(openblas_get_config()) + " (" + openblas_get_corename() + ")";
  return text;
}

}  // namespace tranche::kernels::cpu
