// cuBLASLt's handles, descriptors and choice of algorithms. Products are checked and enqueued on the stream.
#include <cublasLt.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>

#include "tests/cuda_emulation/control.h"
#include "tests/cuda_emulation/cublaslt_task.h"
#include "tests/cuda_emulation/product.h"
#include "tests/cuda_emulation/state.h"

namespace cuda_emulation {
namespace {

// The contents of the other opaque structures in this emulation.
struct Preference {
  std::uint64_t workspace;
  std::uint32_t alignment[4];
  std::uint32_t search, reductions;
};
struct Algorithm {
  std::uint64_t magic, workspace;
  std::uint32_t alignment[4];
};
constexpr std::uint64_t algorithm_magic = 0x454d554c54544c41u;
constexpr std::uint64_t workspace_used = 64 * 1024;

static_assert(sizeof(Description) <= sizeof(cublasLtMatmulDescOpaque_t));
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t));
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

std::atomic<std::uint32_t>& least_alignment() {
  static std::atomic<std::uint32_t> bytes{1};
  return bytes;
}

template <class T, class Opaque>
T read(const Opaque* opaque) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  std::memcpy(&value, opaque, sizeof value);
  return value;
}
template <class T, class Opaque>
void write(Opaque* opaque, const T& value) {
  std::memcpy(opaque, &value, sizeof value);
}

template <class Body>
cublasStatus_t library_call(const char* name, Body&& body) {
  const int refused = begin_call(name, CUBLAS_STATUS_EXECUTION_FAILED, false);
  return refused != 0 ? static_cast<cublasStatus_t>(refused) : body();
}

cublasStatus_t complain(cublasStatus_t status, const std::string& what) {
  misuse(cudaErrorUnknown, what);
  return status;
}

/// Copies an attribute; its size must be right.
template <class T>
cublasStatus_t assign(T& field, const void* value, std::size_t bytes) {
  if (value == nullptr || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&field, value, sizeof(T));
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

void set_least_alignment(std::uint32_t bytes) {
  least_alignment() = bytes;
}

}  // namespace cuda_emulation

using namespace cuda_emulation;

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  return library_call("cublasLtCreate", [&] {
    if (device_count() == 0) return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = reinterpret_cast<cublasLtHandle_t>(new int(0));
    return CUBLAS_STATUS_SUCCESS;
  });
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete reinterpret_cast<int*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

std::size_t cublasLtGetVersion() {
  return CUBLAS_VER_MAJOR * 10000 + CUBLAS_VER_MINOR * 100 + CUBLAS_VER_PATCH;
}

std::size_t cublasLtGetCudartVersion() {
  return CUDART_VERSION;
}

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "CUBLAS_STATUS_UNKNOWN";
  }
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "an invalid value was passed as an argument";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "the function is not supported";
    default:
      return cublasLtGetStatusName(status);
  }
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t description, std::size_t bytes,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
  if (bytes < sizeof(*description)) return CUBLAS_STATUS_INVALID_VALUE;
  Description made{};
  made.compute = compute;
  made.scale = scale;
  made.transpose_a = made.transpose_b = CUBLAS_OP_N;
  made.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  made.bias_type = made.auxiliary_type = -1;
  write(description, made);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  return library_call("cublasLtMatmulDescCreate", [&] {
    *description = new cublasLtMatmulDescOpaque_t{};
    return cublasLtMatmulDescInit_internal(*description, sizeof(**description), compute, scale);
  });
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  delete description;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              std::size_t bytes) {
  return library_call("cublasLtMatmulDescSetAttribute", [&] {
    Description d = read<Description>(description);
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    switch (attribute) {
      case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE:
        status = assign(d.compute, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_SCALE_TYPE:
        status = assign(d.scale, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_POINTER_MODE:
        status = assign(d.pointer_mode, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_TRANSA:
        status = assign(d.transpose_a, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_TRANSB:
        status = assign(d.transpose_b, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_EPILOGUE:
        status = assign(d.epilogue, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        status = assign(d.bias, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE:
        status = assign(d.bias_next, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
        status = assign(d.bias_type, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        status = assign(d.auxiliary, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        status = assign(d.auxiliary_leading, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE:
        status = assign(d.auxiliary_next, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE:
        status = assign(d.auxiliary_type, value, bytes);
        break;
      case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
        status = assign(d.multiprocessors, value, bytes);
        break;
      default:
        complain(status, fmt::format("cublasLtMatmulDescSetAttribute: attribute {} is not emulated",
                                     static_cast<int>(attribute)));
    }
    if (status == CUBLAS_STATUS_SUCCESS) write(description, d);
    return status;
  });
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, std::size_t bytes,
                                                 cudaDataType type, std::uint64_t rows, std::uint64_t columns,
                                                 std::int64_t leading) {
  if (bytes < sizeof(*layout)) return CUBLAS_STATUS_INVALID_VALUE;
  write(layout, Layout{static_cast<std::uint32_t>(type), CUBLASLT_ORDER_COL, rows, columns, leading, 0, 1});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          std::uint64_t rows, std::uint64_t columns, std::int64_t leading) {
  return library_call("cublasLtMatrixLayoutCreate", [&] {
    *layout = new cublasLtMatrixLayoutOpaque_t{};
    return cublasLtMatrixLayoutInit_internal(*layout, sizeof(**layout), type, rows, columns, leading);
  });
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                std::size_t bytes) {
  return library_call("cublasLtMatrixLayoutSetAttribute", [&] {
    Layout l = read<Layout>(layout);
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    switch (attribute) {
      case CUBLASLT_MATRIX_LAYOUT_TYPE:
        status = assign(l.type, value, bytes);
        break;
      case CUBLASLT_MATRIX_LAYOUT_ORDER:
        status = assign(l.order, value, bytes);
        break;
      case CUBLASLT_MATRIX_LAYOUT_ROWS:
        status = assign(l.rows, value, bytes);
        break;
      case CUBLASLT_MATRIX_LAYOUT_COLS:
        status = assign(l.columns, value, bytes);
        break;
      case CUBLASLT_MATRIX_LAYOUT_LD:
        status = assign(l.leading, value, bytes);
        break;
      case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
        status = assign(l.batch, value, bytes);
        break;
      case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
        status = assign(l.next, value, bytes);
        break;
      default:
        complain(status, fmt::format("cublasLtMatrixLayoutSetAttribute: attribute {} is not emulated",
                                     static_cast<int>(attribute)));
    }
    if (status == CUBLAS_STATUS_SUCCESS) write(layout, l);
    return status;
  });
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference,
                                                     std::size_t bytes) {
  if (bytes < sizeof(*preference)) return CUBLAS_STATUS_INVALID_VALUE;
  write(preference, Preference{0, {256, 256, 256, 256}, 0, CUBLASLT_REDUCTION_SCHEME_MASK});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return library_call("cublasLtMatmulPreferenceCreate", [&] {
    *preference = new cublasLtMatmulPreferenceOpaque_t{};
    return cublasLtMatmulPreferenceInit_internal(*preference, sizeof(**preference));
  });
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, std::size_t bytes) {
  return library_call("cublasLtMatmulPreferenceSetAttribute", [&] {
    Preference p = read<Preference>(preference);
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    switch (attribute) {
      case CUBLASLT_MATMUL_PREF_SEARCH_MODE:
        status = assign(p.search, value, bytes);
        break;
      case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        status = assign(p.workspace, value, bytes);
        break;
      case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        status = assign(p.reductions, value, bytes);
        break;
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        status = assign(p.alignment[0], value, bytes);
        break;
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        status = assign(p.alignment[1], value, bytes);
        break;
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        status = assign(p.alignment[2], value, bytes);
        break;
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        status = assign(p.alignment[3], value, bytes);
        break;
      default:
        complain(status, fmt::format("cublasLtMatmulPreferenceSetAttribute: attribute {} is not emulated",
                                     static_cast<int>(attribute)));
    }
    if (status == CUBLAS_STATUS_SUCCESS) write(preference, p);
    return status;
  });
}

// Returns one algorithm that uses a workspace, if one is allowed, and one that needs none.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
  return library_call("cublasLtMatmulAlgoGetHeuristic", [&] {
    if (found == nullptr || results == nullptr || wanted < 1 || handle == nullptr)
      return CUBLAS_STATUS_INVALID_VALUE;
    *found = 0;
    ProductTask task;
    std::string why;
    const Operands layouts{read<Layout>(a), read<Layout>(b), read<Layout>(c), read<Layout>(d)};
    const cublasStatus_t status = plan(read<Description>(description), layouts, task, why);
    if (status == CUBLAS_STATUS_INVALID_VALUE)
      return complain(status, fmt::format("cublasLtMatmulAlgoGetHeuristic: {}", why));
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const Preference p =
        preference != nullptr ? read<Preference>(preference) : Preference{0, {16, 16, 16, 16}, 0, 0};
    if (*std::min_element(std::begin(p.alignment), std::end(p.alignment)) < least_alignment()) {
      return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    for (const std::uint64_t workspace : {workspace_used, std::uint64_t{0}}) {
      if (workspace > p.workspace || *found == wanted) continue;
      cublasLtMatmulHeuristicResult_t& result = results[(*found)++];
      result = {};
      Algorithm algorithm{algorithm_magic, workspace, {}};
      // The algorithm relies on the alignment in the preference.
      for (int i = 0; i < 4; ++i) algorithm.alignment[i] = std::min(p.alignment[i], 16u);
      write(&result.algo, algorithm);
      result.workspaceSize = workspace;
      result.state = CUBLAS_STATUS_SUCCESS;
      result.wavesCount = 1;
    }
    return CUBLAS_STATUS_SUCCESS;
  });
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t layout_a, const void* b,
                              cublasLtMatrixLayout_t layout_b, const void* beta, const void* c,
                              cublasLtMatrixLayout_t layout_c, void* d, cublasLtMatrixLayout_t layout_d,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              std::size_t workspace_bytes, cudaStream_t stream) {
  return library_call("cublasLtMatmul", [&] {
    const auto invalid = [](const std::string& why) {
      return complain(CUBLAS_STATUS_INVALID_VALUE, fmt::format("cublasLtMatmul: {}", why));
    };
    if (handle == nullptr || alpha == nullptr || beta == nullptr)
      return invalid("null handle, alpha or beta");
    ProductTask task;
    std::string why;
    const Description described = read<Description>(description);
    const Operands layouts{read<Layout>(layout_a), read<Layout>(layout_b), read<Layout>(layout_c),
                           read<Layout>(layout_d)};
    const cublasStatus_t status = plan(described, layouts, task, why);
    if (status != CUBLAS_STATUS_SUCCESS) return complain(status, fmt::format("cublasLtMatmul: {}", why));
    task.a.data = const_cast<void*>(a);
    task.b.data = const_cast<void*>(b);
    task.c.data = const_cast<void*>(c);
    task.d.data = d;
    if (described.pointer_mode == CUBLASLT_POINTER_MODE_HOST) {
      task.alpha = *static_cast<const float*>(alpha);
      task.beta = *static_cast<const float*>(beta);
    } else if (described.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE) {
      task.alpha_on_device = static_cast<const float*>(alpha);
      task.beta_on_device = static_cast<const float*>(beta);
    } else {
      return complain(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmul: this pointer mode is not emulated");
    }
    const bool reads_c = task.beta_on_device != nullptr || task.beta != 0;
    if (why = check_ranges(task, reads_c); !why.empty()) return complain(CUBLAS_STATUS_INVALID_VALUE, why);
    if (reads_c && c == d && layouts.c.leading != layouts.d.leading)
      return invalid("c in place of d has another layout");
    std::uint64_t used = 0;
    if (algorithm != nullptr) {
      const Algorithm chosen = read<Algorithm>(algorithm);
      if (chosen.magic != algorithm_magic) return invalid("the algorithm did not come from the heuristic");
      const void* const addresses[] = {a, b, c, d};
      for (int i = 0; i < 4; ++i) {
        if (chosen.alignment[i] != 0 && (i != 2 || reads_c) &&
            reinterpret_cast<std::uintptr_t>(addresses[i]) % chosen.alignment[i] != 0) {
          return invalid(fmt::format("operand {} is not aligned to the {} bytes its algorithm was chosen for",
                                     "abcd"[i], chosen.alignment[i]));
        }
      }
      used = chosen.workspace;
    }
    if (used > workspace_bytes) return invalid("the workspace is smaller than the algorithm needs");
    if (workspace_bytes > 0 && workspace == nullptr) return invalid("the workspace has no address");
    if (used > 0) {
      if (why = complaint_about(workspace, workspace_bytes, true); !why.empty())
        return invalid("the workspace: " + why);
      if (reinterpret_cast<std::uintptr_t>(workspace) % 16 != 0)
        return invalid("the workspace is not aligned to 16 bytes");
    }
    count_launch();
    const int device = device_of(stream);
    const cudaError_t error = submit(stream, {[=] {
                                                const std::string late = check_ranges(task, reads_c);
                                                if (!late.empty()) {
                                                  fail_device(device, cudaErrorIllegalAddress, late);
                                                  return;
                                                }
                                                // Another user of the workspace then finds NaNs.
                                                if (used > 0) std::memset(workspace, 0xff, used);
                                                compute_product(task);
                                              },
                                              true});
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
  });
}
