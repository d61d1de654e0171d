#include "tests/cuda_emulation/cublaslt_task.h"

#include <fmt/format.h>

#include <utility>

#include "tests/cuda_emulation/state.h"

namespace cuda_emulation {

namespace {

bool element_of(std::uint32_t type, Element& element) {
  switch (type) {
    case CUDA_R_32F:
      element = Element::fp32;
      return true;
    case CUDA_R_16BF:
      element = Element::bf16;
      return true;
    case CUDA_R_16F:
      element = Element::fp16;
      return true;
    default:
      return false;
  }
}

std::uint64_t size(Element element) {
  return element == Element::fp32 ? 4 : 2;
}

std::string check_range(const char* name, const Matrix& matrix, std::int64_t batch) {
  const std::int64_t elements =
      (batch - 1) * matrix.next + (matrix.columns - 1) * matrix.leading + matrix.rows;
  std::string why =
      complaint_about(matrix.data, static_cast<std::size_t>(elements) * size(matrix.element), true);
  return why.empty() ? why : fmt::format("cublasLtMatmul: {}: {}", name, why);
}

}  // namespace

cublasStatus_t plan(const Description& description, const Operands& layouts, ProductTask& task,
                    std::string& why) {
  const auto unsupported = [&why](std::string text) {
    why = std::move(text);
    return CUBLAS_STATUS_NOT_SUPPORTED;
  };
  const auto invalid = [&why](std::string text) {
    why = std::move(text);
    return CUBLAS_STATUS_INVALID_VALUE;
  };
  if (description.compute != CUBLAS_COMPUTE_32F && description.compute != CUBLAS_COMPUTE_32F_FAST_TF32 &&
      description.compute != CUBLAS_COMPUTE_32F_FAST_16BF &&
      description.compute != CUBLAS_COMPUTE_32F_FAST_16F) {
    return unsupported(fmt::format("compute type {} is not emulated", description.compute));
  }
  if (description.scale != CUDA_R_32F) return unsupported("scale types other than fp32 are not emulated");
  const Layout* const sources[] = {&layouts.a, &layouts.b, &layouts.c, &layouts.d};
  Matrix* const targets[] = {&task.a, &task.b, &task.c, &task.d};
  for (int i = 0; i < 4; ++i) {
    const Layout& from = *sources[i];
    Matrix& to = *targets[i];
    if (!element_of(from.type, to.element))
      return unsupported(fmt::format("data type {} is not emulated", from.type));
    if (from.order != CUBLASLT_ORDER_COL) return unsupported("only column-major order is emulated");
    if (from.rows == 0 || from.columns == 0 || from.leading < static_cast<std::int64_t>(from.rows)) {
      return invalid(fmt::format("a layout of {} x {} with leading dimension {}", from.rows, from.columns,
                                 from.leading));
    }
    if (from.batch != layouts.d.batch) return invalid("batch counts differ");
    to.rows = static_cast<std::int64_t>(from.rows);
    to.columns = static_cast<std::int64_t>(from.columns);
    to.leading = from.leading;
    to.next = from.next;
  }
  task.batch = layouts.d.batch;
  for (const std::int32_t operation : {description.transpose_a, description.transpose_b}) {
    if (operation != CUBLAS_OP_N && operation != CUBLAS_OP_T)
      return unsupported("conjugates are not emulated");
  }
  task.transpose_a = description.transpose_a == CUBLAS_OP_T;
  task.transpose_b = description.transpose_b == CUBLAS_OP_T;
  const std::int64_t m = task.transpose_a ? task.a.columns : task.a.rows;
  task.k = task.transpose_a ? task.a.rows : task.a.columns;
  const std::int64_t n = task.transpose_b ? task.b.rows : task.b.columns;
  const std::int64_t k = task.transpose_b ? task.b.columns : task.b.rows;
  if (task.k != k || task.d.rows != m || task.d.columns != n || task.c.rows != m || task.c.columns != n) {
    return invalid(fmt::format("sizes do not fit: op(a) {} x {}, op(b) {} x {}, c {} x {}, d {} x {}", m,
                               task.k, k, n, task.c.rows, task.c.columns, task.d.rows, task.d.columns));
  }
  if (task.a.element != task.b.element || task.c.element != task.d.element ||
      (task.d.element != task.a.element && task.d.element != Element::fp32)) {
    return unsupported("this combination of data types has no kernel");
  }

  std::uint32_t epilogue = description.epilogue;
  const bool auxiliary = (epilogue & 128) != 0;
  switch (epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_BIAS:
      break;
    case CUBLASLT_EPILOGUE_RELU:
    case CUBLASLT_EPILOGUE_RELU_BIAS:
      task.activation = Activation::relu;
      break;
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
      task.activation = Activation::gelu;
      break;
    case CUBLASLT_EPILOGUE_DGELU:
      task.activation = Activation::gelu_gradient;
      break;
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
      task.activation = Activation::gelu_gradient;
      task.gradient = ProductTask::Gradient::of_d;
      break;
    case CUBLASLT_EPILOGUE_BGRADA:
      task.gradient = ProductTask::Gradient::of_a;
      break;
    case CUBLASLT_EPILOGUE_BGRADB:
      task.gradient = ProductTask::Gradient::of_b;
      break;
    default:
      return unsupported(fmt::format("epilogue {} is not emulated", epilogue));
  }
  task.bias_element = task.d.element;
  if (description.bias_type >= 0 &&
      !element_of(static_cast<std::uint32_t>(description.bias_type), task.bias_element)) {
    return unsupported("this type of bias is not emulated");
  }
  task.bias_next = description.bias_next;
  if (task.gradient != ProductTask::Gradient::none) {
    task.bias_gradient = const_cast<void*>(description.bias);
    if (description.bias == nullptr) return invalid("the epilogue's bias gradient has no pointer");
  } else if ((epilogue & CUBLASLT_EPILOGUE_BIAS) != 0) {
    task.bias = description.bias;
    if (description.bias == nullptr) return invalid("the epilogue's bias has no pointer");
  }
  if (auxiliary) {
    task.auxiliary = task.d;
    task.auxiliary.data = description.auxiliary;
    if (description.auxiliary_type >= 0 &&
        !element_of(static_cast<std::uint32_t>(description.auxiliary_type), task.auxiliary.element)) {
      return unsupported("this type of auxiliary matrix is not emulated");
    }
    task.auxiliary.leading = description.auxiliary_leading;
    task.auxiliary.next = description.auxiliary_next;
    if (description.auxiliary_leading < m)
      return invalid("the auxiliary matrix's leading dimension is too small");
    if (description.auxiliary_leading % 8 != 0 ||
        reinterpret_cast<std::uintptr_t>(description.auxiliary) % 16 != 0) {
      return unsupported(
          "the auxiliary matrix's leading dimension must be a multiple of 8 and its address of 16");
    }
    if (description.auxiliary == nullptr) return invalid("the epilogue's auxiliary matrix has no pointer");
  }
  return CUBLAS_STATUS_SUCCESS;
}

std::string check_ranges(const ProductTask& task, bool reads_c) {
  std::string why = check_range("a", task.a, task.batch);
  if (why.empty()) why = check_range("b", task.b, task.batch);
  if (why.empty() && reads_c) why = check_range("c", task.c, task.batch);
  if (why.empty()) why = check_range("d", task.d, task.batch);
  if (why.empty() && task.auxiliary.data != nullptr)
    why = check_range("the auxiliary matrix", task.auxiliary, task.batch);
  const void* bias = task.bias != nullptr ? task.bias : task.bias_gradient;
  if (why.empty() && bias != nullptr) {
    const bool of_columns = task.gradient == ProductTask::Gradient::of_b;
    const std::int64_t length =
        (task.batch - 1) * task.bias_next + (of_columns ? task.d.columns : task.d.rows);
    why = complaint_about(bias, static_cast<std::size_t>(length) * size(task.bias_element), true);
    if (!why.empty()) why = fmt::format("cublasLtMatmul: the bias: {}", why);
  }
  return why;
}

}  // namespace cuda_emulation
