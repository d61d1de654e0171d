#pragma once
/// Matrix multiplications. These rules hold for all kernels: calls enqueue on `stream` and may return before
/// the work is done; operands lie in memory of the stream's device and stay valid until the stream has passed
/// the work; outputs do not overlap inputs unless stated otherwise.

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels {

struct MatmulOptions {
  bool transpose_a = false;  ///< a is stored [k, m] instead of [m, k]
  bool transpose_b = false;  ///< b is stored [n, k] instead of [k, n]
  bool accumulate = false;   ///< c += a b instead of c = a b
  /// c (fp32) holds the sums over earlier values of k, which this call continues: calls for consecutive parts
  /// of k give the bits of one product that does not accumulate. Only if matmul_sum_order() is ascending and
  /// each part but the last is a multiple of its step.
  bool continues = false;
};

/// The order in which a matmul adds over k.
struct SumOrder {
  /// Each element is one fp32 sum over ascending k, whatever the other sizes are, so MatmulOptions::continues
  /// works.
  bool ascending = false;
  std::int64_t step = 1;       ///< values of k that are added at once
  bool begins_with_c = false;  ///< true: an accumulating sum begins with c; false: c is added at its end
};
/// The order of a device for the dtype of a and b. A plan (meta) assumes that every sum is ascending.
SumOrder matmul_sum_order(DeviceKind device, DataType dtype);

/// c[m, n] = op(a)[m, k] op(b)[k, n], with sums in fp32. a and b share a dtype (fp32, bf16, fp16); c has that
/// dtype or fp32. cpu, fp32: oneDNN's sgemm with AVX-512, else OpenBLAS. cpu, bf16: oneDNN with AMX, our own
/// loops where the CPU multiplies bf16 faster than fp32, else tiles widened to fp32; fp16: always widened.
/// `workspace` has at least minimum_workspace_bytes for 16-bit dtypes. The same operands and number of
/// threads give the same bits; all algorithms except oneDNN's bf16 give them for any number of threads and
/// size of workspace. cuda: cuBLASLt, with an algorithm chosen once for each shape within `workspace`; fp32
/// is IEEE fp32 (no TF32); the same shape, size of workspace, library and kind of GPU give the same bits.
/// Throws InvalidArgument on shapes or dtypes. Accumulating into a 16-bit c rounds once.
void matmul(Stream& stream, const MatmulOptions& options, const ConstTensorView& a, const ConstTensorView& b,
            const TensorView& c, const Workspace& workspace);

/// out[m, n] = a[m, k] b[k, n] + bias[n], all of one dtype; with `transpose_b` b is stored [n, k]. cpu:
/// matmul, then add_bias, which rounds 16-bit sums twice; cuda: one launch, rounded once (where cuBLASLt has
/// no such algorithm: as on the cpu).
void matmul_bias(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                 const ConstTensorView& bias, const TensorView& out, const Workspace& workspace,
                 bool transpose_b = false);

/// hidden[m, n] = a b + bias, activated[m, n] = gelu(hidden), the tanh form; all of one dtype. cpu:
/// matmul_bias, then gelu_forward of the rounded hidden; cuda: one launch where cuBLASLt supports the shape
/// (n a multiple of 8), in which gelu is applied before the sum is rounded, so that gelu_forward(hidden)
/// differs from `activated` by a rounding of the argument.
void matmul_bias_gelu(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                      const ConstTensorView& bias, const TensorView& hidden, const TensorView& activated,
                      const Workspace& workspace);

/// d_hidden[m, k] = d_out[m, n] weight[k, n]^T * gelu'(hidden[m, k]), all of one dtype: the gradient of gelu
/// and of the linear layer after matmul_bias_gelu. cpu: matmul, then gelu_backward in place; cuda: one launch
/// where cuBLASLt supports it (k a multiple of 8), rounded once instead of twice.
void matmul_gelu_backward(Stream& stream, const ConstTensorView& d_out, const ConstTensorView& weight,
                          const ConstTensorView& hidden, const TensorView& d_hidden,
                          const Workspace& workspace);

/// The algorithm of a matmul with this dtype on this machine: "own bf16 panels (avx512_bf16)", "oneDNN bf16
/// (avx512_core_amx)", "OpenBLAS sgemm", "oneDNN sgemm", "widened to fp32, OpenBLAS sgemm", "cuBLASLt bf16,
/// sums in fp32". For `info` and the start-up table. Throws NotCompiled for cuda in a build without it.
std::string_view matmul_path(DeviceKind device, DataType dtype);
/// The workspace for which a device's kernels are designed: CPUs are no faster with more than the least;
/// cuBLASLt has more algorithms to choose from in 32 MiB. A plan (meta) assumes a CPU unless configured
/// otherwise.
std::int64_t default_workspace_bytes(DeviceKind device);
/// The libraries with versions and the instruction sets that they (and our own loops) use, or the compute
/// capability of the calling thread's GPU, for the numerics fingerprint.
std::string matmul_libraries(DeviceKind device);

}  // namespace tranche::kernels
