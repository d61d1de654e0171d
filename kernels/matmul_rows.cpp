#include "tranche/kernels/matmul_rows.h"

#include <fmt/core.h>

#include <algorithm>

#include "kernels/check.h"
#include "kernels/cpu/matmul_rows.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/matmul.h"
#include "kernels/dispatch.h"
#include "kernels/meta/matmul_cost.h"

namespace tranche::kernels {

namespace {

cuda::Gemm gemm_of_rows(const cpu::MatmulRows& call) {
  cuda::Gemm gemm = cuda::dense(false, call.transpose_b, call.m, call.n, call.k);
  gemm.dtype = call.dtype;
  gemm.c_dtype = call.c_dtype;
  gemm.a = call.a;
  gemm.b = call.b;
  gemm.c = call.c;
  return gemm;
}

}  // namespace

void matmul_rows(Stream& stream, bool transpose_b, const ConstTensorView& a, const ConstTensorView& b,
                 const ConstTensorView& bias, const TensorView& c, const Workspace& workspace) {
  constexpr std::string_view kernel = "matmul_rows";
  check_floating(kernel, "a", a.dtype);
  check_dtype(kernel, "b", b.dtype, {a.dtype});
  check_rank(kernel, "a", a.shape, 2);
  check_rank(kernel, "b", b.shape, 2);
  const std::int64_t m = a.shape[0], k = a.shape[1], n = b.shape[transpose_b ? 0 : 1];
  check_shape(kernel, transpose_b ? "b (transposed)" : "b", b.shape, transpose_b ? Shape{n, k} : Shape{k, n});
  check_shape(kernel, "c", c.shape, {m, n});
  if (is_given(bias)) {
    check_dtype(kernel, "bias", bias.dtype, {a.dtype});
    check_shape(kernel, "bias", bias.shape, {n});
    check_dtype(kernel, "c", c.dtype, {a.dtype});
  } else if (a.dtype == DataType::float32) {
    check_dtype(kernel, "c", c.dtype, {DataType::float32});
  } else {
    check_dtype(kernel, "c", c.dtype, {a.dtype, DataType::float32});
  }
  if (a.dtype != DataType::float32) {
    // The workspace must hold a row of a and a row of c in fp32.
    const std::int64_t least = std::max(minimum_workspace_bytes, checked_multiply(4, checked_add(k, n)));
    if (workspace.bytes < least) {
      refuse(kernel, fmt::format("workspace has {} bytes; {} GEMMs need at least {}: raise tranche.workspace",
                                 workspace.bytes, name_of(a.dtype), least));
    }
  }
  const cpu::MatmulRows call{.transpose_b = transpose_b,
                             .m = m,
                             .n = n,
                             .k = k,
                             .dtype = a.dtype,
                             .c_dtype = c.dtype,
                             .a = a.data,
                             .b = b.data,
                             .bias = bias.data,
                             .c = c.data,
                             .workspace = workspace,
                             .threads = stream.threads()};
  meta::Cost cost = is_given(bias) ? meta::matmul_bias_cost(m, n, k, a.dtype)
                                   : meta::matmul_cost(m, n, k, a.dtype, c.dtype, false);
  cost.gemm.transpose_b = transpose_b;
  dispatch(
      stream, kernel, cost, [call] { cpu::matmul_rows(call); },
      [&] {
        if (call.bias == nullptr) return cuda::gemm(stream, gemm_of_rows(call), workspace);
        cuda::matmul_bias(stream, gemm_of_rows(call), c, bias, workspace);
      });
}

}  // namespace tranche::kernels
