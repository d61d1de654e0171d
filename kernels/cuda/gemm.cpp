#include "kernels/cuda/gemm.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <map>
#include <memory>
#include <type_traits>
#include <utility>

#include "kernels/cuda/plain_gemm.h"
#include "tranche/core/error.h"

namespace tranche::kernels::cuda {

namespace {

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(fmt::format("{} failed: {} (status {})", what, cublasLtGetStatusString(status),
                          static_cast<int>(status)));
}

/// Owns one of cuBLASLt's handles, which are pointers with a function that destroys them.
template <class T, cublasStatus_t (*destroy)(T)>
struct Destroyer {
  using pointer = T;
  void operator()(T object) const { destroy(object); }
};
template <class T, cublasStatus_t (*destroy)(T)>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, Destroyer<T, destroy>>;
using Handle = Owned<cublasLtHandle_t, cublasLtDestroy>;
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

cudaDataType_t type_of(DataType dtype) {
  switch (dtype) {
    case DataType::bfloat16:
      return CUDA_R_16BF;
    case DataType::float16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

cublasLtEpilogue_t epilogue_of(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::bias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::bias_gelu:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::gelu_backward:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::none:
      break;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

template <class T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)),
        "cublasLtMatmulDescSetAttribute");
}
template <class T>
void set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const T& value) {
  check(cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof(value)),
        "cublasLtMatrixLayoutSetAttribute");
}
template <class T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
        "cublasLtMatmulPreferenceSetAttribute");
}

/// Describes a row-major matrix to cuBLASLt, which is column-major: rows and columns are exchanged.
Layout layout_of(DataType dtype, std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                 std::int64_t batch, std::int64_t next) {
  cublasLtMatrixLayout_t made = nullptr;
  check(cublasLtMatrixLayoutCreate(&made, type_of(dtype), static_cast<std::uint64_t>(columns),
                                   static_cast<std::uint64_t>(rows), row_stride),
        "cublasLtMatrixLayoutCreate");
  Layout layout(made);
  if (batch > 1) {
    set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(batch));
    set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, next);
  }
  return layout;
}

/// cuBLASLt's descriptors for one kind of GEMM, and its algorithm, if there is one.
struct Plan {
  Operation operation;
  Layout a, b, c;
  cublasLtMatmulAlgo_t algorithm = {};
  bool found = false;
};

void set_pointers(const Plan& plan, const Gemm& gemm) {
  cublasLtMatmulDesc_t operation = plan.operation.get();
  if (gemm.epilogue == Epilogue::bias || gemm.epilogue == Epilogue::bias_gelu) {
    set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, gemm.bias);
  }
  if (gemm.epilogue == Epilogue::bias_gelu || gemm.epilogue == Epilogue::gelu_backward) {
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, gemm.auxiliary);
  }
}

Plan make_plan(cublasLtHandle_t handle, const Gemm& gemm, const GemmKey& key) {
  Plan plan;
  cublasLtMatmulDesc_t operation = nullptr;
  // CUBLAS_COMPUTE_32F multiplies fp32 operands in IEEE fp32; other modes would round them to TF32 or bf16.
  // 16-bit operands go to tensor cores and are summed in fp32.
  check(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  plan.operation.reset(operation);
  // c^T = op(b)^T op(a)^T, and in column-major order a row-major matrix is its transpose. So the operands
  // change places and keep their flags.
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, gemm.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, gemm.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(gemm.epilogue));
  if (gemm.auxiliary != nullptr) set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, gemm.row_c);
  set_pointers(plan, gemm);
  plan.a = layout_of(gemm.dtype, gemm.transpose_a ? gemm.k : gemm.m, gemm.transpose_a ? gemm.m : gemm.k,
                     gemm.row_a, gemm.batch, gemm.next_a);
  plan.b = layout_of(gemm.dtype, gemm.transpose_b ? gemm.n : gemm.k, gemm.transpose_b ? gemm.k : gemm.n,
                     gemm.row_b, gemm.batch, gemm.next_b);
  plan.c = layout_of(gemm.c_dtype, gemm.m, gemm.n, gemm.row_c, gemm.batch, gemm.next_c);

  cublasLtMatmulPreference_t made = nullptr;
  check(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
  const Preference preference(made);
  set(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(key.workspace_bytes));
  set(made, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.align_b);
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.align_a);
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.align_c);
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.align_c);
  cublasLtMatmulHeuristicResult_t result = {};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, operation, plan.b.get(), plan.a.get(), plan.c.get(), plan.c.get(), made, 1, &result, &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count == 0)) return plan;
  check(status, "cublasLtMatmulAlgoGetHeuristic");
  if (result.state != CUBLAS_STATUS_SUCCESS) return plan;
  plan.algorithm = result.algo;
  plan.found = true;
  return plan;
}

/// The library handle of one stream and the algorithms that it has chosen. Choosing takes longer than
/// launching, so it is done once for each kind of GEMM.
class GemmPlans {
 public:
  GemmPlans() {
    cublasLtHandle_t made = nullptr;
    check(cublasLtCreate(&made), "cublasLtCreate");
    handle_.reset(made);
  }
  cublasLtHandle_t handle() const { return handle_.get(); }
  const Plan& plan(const Gemm& gemm, const GemmKey& key) {
    const auto known = plans_.find(key);
    if (known != plans_.end()) return known->second;
    return plans_.emplace(key, make_plan(handle(), gemm, key)).first->second;
  }

 private:
  Handle handle_;
  std::map<GemmKey, Plan> plans_;
};

std::string text_of(const Gemm& p) {
  return fmt::format("[{}, {}]{} [{}, {}]{} of {} into {}, batch {}", p.m, p.k,
                     p.transpose_a ? " (transposed)" : "", p.k, p.n, p.transpose_b ? " (transposed)" : "",
                     name_of(p.dtype), name_of(p.c_dtype), p.batch);
}

/// c = beta c, or zeros for beta 0: the GEMM with k = 0.
void over_nothing(Stream& stream, const Gemm& gemm) {
  if (gemm.beta == 1.0f) return;
  if (gemm.beta != 0.0f) throw InvalidArgument("a GEMM with k = 0 can only keep or clear what it adds to");
  const auto bytes = static_cast<std::size_t>(size_of(gemm.c_dtype));
  for (std::int64_t i = 0; i < gemm.batch; ++i) {
    auto* c = static_cast<unsigned char*>(gemm.c) + static_cast<std::size_t>(i * gemm.next_c) * bytes;
    const cudaError_t error = cudaMemset2DAsync(
        c, static_cast<std::size_t>(gemm.row_c) * bytes, 0, static_cast<std::size_t>(gemm.n) * bytes,
        static_cast<std::size_t>(gemm.m), static_cast<cudaStream_t>(stream.native_handle()));
    if (error != cudaSuccess) {
      throw Error(std::string("cudaMemset2DAsync failed: ") + cudaGetErrorString(error));
    }
  }
}

}  // namespace

GemmKey key_of(const Gemm& p, std::int64_t workspace_bytes) {
  const auto align = [](const void* data, DataType dtype, std::int64_t row, std::int64_t next) {
    return gemm_alignment(reinterpret_cast<std::uintptr_t>(data), row * size_of(dtype),
                          next * size_of(dtype));
  };
  return {p.transpose_a,
          p.transpose_b,
          p.beta != 0.0f,
          p.m,
          p.n,
          p.k,
          p.dtype,
          p.c_dtype,
          p.row_a,
          p.row_b,
          p.row_c,
          p.batch,
          p.next_a,
          p.next_b,
          p.next_c,
          p.epilogue,
          align(p.a, p.dtype, p.row_a, p.next_a),
          align(p.b, p.dtype, p.row_b, p.next_b),
          align(p.c, p.c_dtype, p.row_c, p.next_c),
          align(p.bias, p.c_dtype, 0, 0),
          align(p.auxiliary, p.c_dtype, p.row_c, 0),
          workspace_bytes};
}

bool epilogue_possible(const Gemm& p) {
  if (p.m == 0 || p.n == 0 || p.k == 0) return false;
  if (p.epilogue != Epilogue::bias_gelu && p.epilogue != Epilogue::gelu_backward) return true;
  return p.row_c % 8 == 0 && reinterpret_cast<std::uintptr_t>(p.auxiliary) % 16 == 0;
}

bool try_gemm(Stream& stream, const Gemm& gemm, const Workspace& workspace) {
  if (gemm.m == 0 || gemm.n == 0 || gemm.batch == 0) return true;
  if (gemm.epilogue != Epilogue::none && !epilogue_possible(gemm)) return false;
  if (gemm.k == 0) {
    over_nothing(stream, gemm);
    return true;
  }
  auto& plans = stream.attachment<GemmPlans>();
  const GemmKey key = key_of(gemm, workspace.bytes);
  const Plan& plan = plans.plan(gemm, key);
  if (!plan.found) {
    if (gemm.epilogue != Epilogue::none) return false;
    plain_gemm(stream, gemm);
    return true;
  }
  set_pointers(plan, gemm);
  const cublasStatus_t status = cublasLtMatmul(
      plans.handle(), plan.operation.get(), &gemm.alpha, gemm.b, plan.b.get(), gemm.a, plan.a.get(),
      &gemm.beta, gemm.c, plan.c.get(), gemm.c, plan.c.get(), &plan.algorithm, workspace.data,
      static_cast<std::size_t>(workspace.bytes), static_cast<cudaStream_t>(stream.native_handle()));
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw Error(fmt::format("cublasLtMatmul of {} failed: {} (status {})", text_of(gemm),
                            cublasLtGetStatusString(status), static_cast<int>(status)));
  }
  return true;
}

void gemm(Stream& stream, const Gemm& gemm, const Workspace& workspace) {
  if (gemm.epilogue != Epilogue::none) throw InvalidArgument("gemm() has no epilogue; see try_gemm()");
  static_cast<void>(try_gemm(stream, gemm, workspace));
}

}  // namespace tranche::kernels::cuda
