#include "tranche/kernels/matmul.h"

#include <fmt/core.h>

#include "tranche/kernels/check.h"
#include "tranche/kernels/cpu/matmul.h"
#include "tranche/kernels/cuda/matmul.h"
#include "tranche/kernels/cuda/product.h"
#include "tranche/kernels/dispatch.h"
#include "tranche/kernels/meta/matmul_cost.h"

namespace tranche::kernels {

namespace {

cuda::Product product_of(const cpu::MatmulCall& call) {
  cuda::Product product = cuda::dense(call.transpose_a, call.transpose_b, call.m, call.n, call.k);
  product.dtype = call.dtype;
  product.c_dtype = call.c_dtype;
  product.a = call.a;
  product.b = call.b;
  product.c = call.c;
  product.beta = call.accumulate ? 1.0f : 0.0f;
  return product;
}

}  // namespace

void matmul(Stream& stream, const MatmulOptions& options, const ConstTensorView& a, const ConstTensorView& b,
            const TensorView& c, const Workspace& workspace) {
  check_floating("matmul", "a", a.dtype);
  check_dtype("matmul", "b", b.dtype, {a.dtype});
  if (a.dtype == DataType::float32) {
    check_dtype("matmul", "c", c.dtype, {DataType::float32});
  } else {
    check_dtype("matmul", "c", c.dtype, {a.dtype, DataType::float32});
  }
  check_rank("matmul", "a", a.shape, 2);
  check_rank("matmul", "b", b.shape, 2);
  const std::int64_t m = a.shape[options.transpose_a ? 1 : 0];
  const std::int64_t k = a.shape[options.transpose_a ? 0 : 1];
  const std::int64_t n = b.shape[options.transpose_b ? 0 : 1];
  check_shape("matmul", options.transpose_b ? "b (transposed)" : "b", b.shape,
              options.transpose_b ? Shape{n, k} : Shape{k, n});
  check_shape("matmul", "c", c.shape, {m, n});
  if (a.dtype != DataType::float32 && workspace.bytes < minimum_workspace_bytes) {
    refuse("matmul", fmt::format("workspace has {} bytes; {} products need at least {}", workspace.bytes,
                                 name_of(a.dtype), minimum_workspace_bytes));
  }
  const cpu::MatmulCall call{options.transpose_a,
                             options.transpose_b,
                             options.accumulate,
                             m,
                             n,
                             k,
                             a.dtype,
                             c.dtype,
                             a.data,
                             b.data,
                             c.data,
                             workspace,
                             stream.threads()};
  dispatch(
      stream, "matmul", meta::matmul_cost(m, n, k, a.dtype, c.dtype, options.accumulate),
      [call] { cpu::matmul(call); }, [&] { cuda::product(stream, product_of(call), workspace); });
}

std::string_view matmul_path(DeviceKind device, DataType dtype) {
  switch (device) {
    case DeviceKind::cpu:
      return cpu::matmul_path(dtype);
    case DeviceKind::meta:
      return "counted, not computed";
    case DeviceKind::cuda:
      break;
  }
  return cuda::matmul_path(dtype);
}

std::string matmul_libraries(DeviceKind device) {
  switch (device) {
    case DeviceKind::cpu:
      return cpu::matmul_libraries();
    case DeviceKind::meta:
      return "none";
    case DeviceKind::cuda:
      break;
  }
  return cuda::matmul_libraries();
}

}  // namespace tranche::kernels
