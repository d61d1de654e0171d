#include <cblas.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "kernels/cpu/isolated_library.h"
#include "kernels/cpu/matmul_onednn.h"
#include "kernels/cpu/product_probe.h"
#include "kernels/cpu/sgemm.h"
#include "tranche/core/shape.h"

namespace tranche::kernels::cpu {

namespace {

/// The functions of OpenBLAS that are called here.
struct OpenBlas {
  decltype(&cblas_sgemm) sgemm;
  decltype(&openblas_get_config) get_config;
  decltype(&openblas_get_corename) get_corename;
  decltype(&openblas_get_num_threads) get_num_threads;
  decltype(&openblas_set_num_threads) set_num_threads;
};

/// The library is loaded and tested at its first use.
const OpenBlas& openblas() {
  static const OpenBlas functions = [] {
    const IsolatedLibrary library({TRANCHE_OPENBLAS_PATH, "libopenblas.so.0"},
                                  "OpenBLAS (Debian: libopenblas-pthread-dev)");
    OpenBlas f{};
    library.find(f.sgemm, "cblas_sgemm");
    library.find(f.get_config, "openblas_get_config");
    library.find(f.get_corename, "openblas_get_corename");
    library.find(f.get_num_threads, "openblas_get_num_threads");
    library.find(f.set_num_threads, "openblas_set_num_threads");
    f.set_num_threads(1);
    probe_product("OpenBLAS", [&](const float* a, const float* b, float* c, std::int64_t n) {
      const auto size = narrow<blasint>(n);
      f.sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, size, size, size, 1, a, size, b, size, 0, c, size);
      return true;
    });
    return f;
  }();
  return functions;
}

/// Each of our threads calls OpenBLAS for its own tile, so OpenBLAS must not start threads. Its thread count
/// is one number for the whole process and would otherwise make ranks that share a process depend on each
/// other.
void keep_to_calling_thread() {
  if (openblas().get_num_threads() == 1) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (openblas().get_num_threads() != 1) openblas().set_num_threads(1);
}

/// oneDNN generates its sgemm kernels for the CPU's instruction sets. With AVX-512 it is faster at every tile
/// size (4 to 28 % on Zen 4, bench/results/2026-11-22-step-speed.md). Without, OpenBLAS is, unless it does
/// not know the CPU: it selects kernels by the model number, and on models newer than itself those of 2004
/// (SSE3), at a fifth of the speed or less.
bool openblas_is_faster() {
  static const bool faster = [] {
    if (onednn_has_wide_sgemm()) return false;
    constexpr std::array<std::string_view, 5> modern{"Haswell", "Zen", "SkylakeX", "Cooperlake",
                                                     "SapphireRapids"};
    const std::string_view core = openblas().get_corename();
    return !onednn_has_sgemm() || std::find(modern.begin(), modern.end(), core) != modern.end();
  }();
  return faster;
}

}  // namespace

void sgemm(const SgemmArguments& arguments) {
  if (arguments.m == 0 || arguments.n == 0) return;
  if (!openblas_is_faster() && arguments.k > 0) return onednn_sgemm(arguments);
  keep_to_calling_thread();
  openblas().sgemm(CblasRowMajor, arguments.transpose_a ? CblasTrans : CblasNoTrans,
                   arguments.transpose_b ? CblasTrans : CblasNoTrans, narrow<blasint>(arguments.m),
                   narrow<blasint>(arguments.n), narrow<blasint>(arguments.k), arguments.alpha, arguments.a,
                   narrow<blasint>(arguments.stride_a), arguments.b, narrow<blasint>(arguments.stride_b),
                   arguments.beta, arguments.c, narrow<blasint>(arguments.stride_c));
}

std::string_view sgemm_path() {
  return openblas_is_faster() ? "OpenBLAS sgemm" : "oneDNN sgemm";
}

std::string sgemm_library() {
  // OpenBLAS writes its answer to one buffer of the process, so it is called once, not by several ranks'
  // threads at the same time.
  static const std::string text =
      std::string(openblas().get_config()) + " (" + openblas().get_corename() + ")";
  return text;
}

}  // namespace tranche::kernels::cpu
