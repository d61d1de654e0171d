#include "tranche/kernels/matmul.h"

#include <fmt/core.h>

#include <initializer_list>
#include <utility>

#include "kernels/check.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/matmul.h"
#include "kernels/dispatch.h"
#include "kernels/matmul_log.h"
#include "kernels/meta/matmul_cost.h"

namespace tranche::kernels {

namespace {

cuda::Gemm gemm_of(const cpu::MatmulCall& call) {
  cuda::Gemm gemm = cuda::dense(call.transpose_a, call.transpose_b, call.m, call.n, call.k);
  gemm.dtype = call.dtype;
  gemm.c_dtype = call.c_dtype;
  gemm.a = call.a;
  gemm.b = call.b;
  gemm.c = call.c;
  gemm.beta = call.accumulate ? 1.0f : 0.0f;
  return gemm;
}

/// Checks the operands of a GEMM, naming the called kernel in errors, and appends it to the log if there is
/// one.
cpu::MatmulCall checked(std::string_view kernel, Stream& stream, const MatmulOptions& options,
                        const ConstTensorView& a, const ConstTensorView& b, const TensorView& c,
                        const Workspace& workspace) {
  check_rank(kernel, "a", a.shape, 2);
  check_rank(kernel, "b", b.shape, 2);
  const std::int64_t m = a.shape[options.transpose_a ? 1 : 0];
  const std::int64_t k = a.shape[options.transpose_a ? 0 : 1];
  const std::int64_t n = b.shape[options.transpose_b ? 0 : 1];
  check_shape(kernel, options.transpose_b ? "b (transposed)" : "b", b.shape,
              options.transpose_b ? Shape{n, k} : Shape{k, n});
  check_shape(kernel, "c", c.shape, {m, n});
  if (a.dtype != DataType::float32 && workspace.bytes < minimum_workspace_bytes) {
    refuse(kernel, fmt::format("workspace has {} bytes; {} GEMMs need at least {}: raise tranche.workspace",
                               workspace.bytes, name_of(a.dtype), minimum_workspace_bytes));
  }
  if (auto* gemms = stream.attachment<MatmulLog>().gemms; gemms != nullptr) {
    gemms->push_back(
        {options.transpose_a, options.transpose_b, options.accumulate, m, n, k, a.dtype, c.dtype});
  }
  return {options.transpose_a,
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
          stream.threads(),
          options.continues};
}

/// Refuses sums that cannot continue in the order of one product.
void check_continues(const MatmulOptions& options, const cpu::MatmulCall& call, DeviceKind device) {
  const SumOrder order = matmul_sum_order(device, call.dtype);
  if (!order.ascending) {
    refuse("matmul", fmt::format("sums cannot be continued: {} does not add in ascending order",
                                 matmul_path(device, call.dtype)));
  }
  if (call.c_dtype != DataType::float32 || options.accumulate) {
    refuse("matmul", "continued sums need an fp32 `c`, and exclude `accumulate`");
  }
  if (call.k % order.step != 0 && options.transpose_b) {
    refuse("matmul",
           fmt::format("sums are continued by {} values of k at a time, and k = {} is not a multiple of that",
                       order.step, call.k));
  }
}

/// Checks that all operands have one dtype, as the fused kernels require.
void check_one_dtype(std::string_view kernel, DataType wanted,
                     std::initializer_list<std::pair<std::string_view, ConstTensorView>> operands) {
  check_floating(kernel, "a", wanted);
  for (const auto& [name, view] : operands) check_dtype(kernel, name, view.dtype, {wanted});
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
  const cpu::MatmulCall call = checked("matmul", stream, options, a, b, c, workspace);
  if (options.continues) check_continues(options, call, stream.kind());
  meta::Cost cost =
      meta::matmul_cost(call.m, call.n, call.k, a.dtype, c.dtype, options.accumulate || options.continues);
  cost.gemm.transpose_a = options.transpose_a;
  cost.gemm.transpose_b = options.transpose_b;
  dispatch(
      stream, "matmul", cost, [call] { cpu::matmul(call); },
      [&] { cuda::gemm(stream, gemm_of(call), workspace); });
}

void matmul_bias(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                 const ConstTensorView& bias, const TensorView& out, const Workspace& workspace,
                 bool transpose_b) {
  constexpr std::string_view kernel = "matmul_bias";
  check_one_dtype(kernel, a.dtype, {{"b", b}, {"bias", bias}, {"c", out}});
  const cpu::MatmulCall call = checked(kernel, stream, {.transpose_b = transpose_b}, a, b, out, workspace);
  check_shape(kernel, "bias", bias.shape, {call.n});
  meta::Cost cost = meta::matmul_bias_cost(call.m, call.n, call.k, a.dtype);
  cost.gemm.transpose_b = transpose_b;
  dispatch(
      stream, kernel, cost, [call, out, bias] { cpu::matmul_bias(call, out, bias); },
      [&] { cuda::matmul_bias(stream, gemm_of(call), out, bias, workspace); });
}

void matmul_bias_gelu(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                      const ConstTensorView& bias, const TensorView& hidden, const TensorView& activated,
                      const Workspace& workspace) {
  constexpr std::string_view kernel = "matmul_bias_gelu";
  check_one_dtype(kernel, a.dtype, {{"b", b}, {"bias", bias}, {"c", hidden}, {"activated", activated}});
  const cpu::MatmulCall call = checked(kernel, stream, {}, a, b, hidden, workspace);
  check_shape(kernel, "bias", bias.shape, {call.n});
  check_shape(kernel, "activated", activated.shape, hidden.shape);
  dispatch(
      stream, kernel, meta::matmul_bias_gelu_cost(call.m, call.n, call.k, a.dtype),
      [call, hidden, activated, bias] {
        cpu::matmul_bias(call, hidden, bias);
        cpu::gelu_forward(call.threads, hidden, activated);
      },
      [&] { cuda::matmul_bias_gelu(stream, gemm_of(call), hidden, activated, bias, workspace); });
}

void matmul_gelu_backward(Stream& stream, const ConstTensorView& d_out, const ConstTensorView& weight,
                          const ConstTensorView& hidden, const TensorView& d_hidden,
                          const Workspace& workspace) {
  constexpr std::string_view kernel = "matmul_gelu_backward";
  check_one_dtype(kernel, d_out.dtype, {{"b", weight}, {"hidden", hidden}, {"c", d_hidden}});
  const cpu::MatmulCall call =
      checked(kernel, stream, {.transpose_b = true}, d_out, weight, d_hidden, workspace);
  check_shape(kernel, "hidden", hidden.shape, d_hidden.shape);
  dispatch(
      stream, kernel, meta::matmul_gelu_backward_cost(call.m, call.n, call.k, d_out.dtype),
      [call, hidden, d_hidden] {
        cpu::matmul(call);
        cpu::gelu_backward(call.threads, hidden, d_hidden, d_hidden);
      },
      [&] { cuda::matmul_gelu_backward(stream, gemm_of(call), hidden, d_hidden, workspace); });
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
  return with_cuda([&] { return cuda::matmul_path(dtype); });
}

SumOrder matmul_sum_order(DeviceKind device, DataType dtype) {
  if (device == DeviceKind::meta) return {.ascending = true};
  return device == DeviceKind::cpu ? cpu::sum_order(dtype) : SumOrder{};
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
  return with_cuda([] { return cuda::matmul_libraries(); });
}

std::int64_t default_workspace_bytes(DeviceKind device) {
  return device == DeviceKind::cuda ? 4 * minimum_workspace_bytes : minimum_workspace_bytes;
}

}  // namespace tranche::kernels
