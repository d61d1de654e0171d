#include "kernels/check.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/dispatch.h"

namespace tranche::kernels {

void note_work(Stream& stream, std::string_view name, const meta::Cost& cost) {
  detail::RecordedWork work;
  work.kind = detail::WorkKind::kernel;
  work.name = name;
  work.operations = cost.operations;
  work.bytes_read = cost.bytes_read;
  work.bytes_written = cost.bytes_written;
  work.gemm = cost.gemm;
  stream.recorder()->add(stream.lane(), std::move(work));
}

void refuse(std::string_view kernel, std::string_view what, std::source_location where) {
  throw InvalidArgument(fmt::format("{}: {}", kernel, what), where);
}

void check_dtype(std::string_view kernel, std::string_view operand, DataType held,
                 std::initializer_list<DataType> wanted, std::source_location where) {
  if (std::find(wanted.begin(), wanted.end(), held) != wanted.end()) return;
  std::string names;
  for (auto it = wanted.begin(); it != wanted.end(); ++it) {
    if (it != wanted.begin()) names += it + 1 == wanted.end() ? " or " : ", ";
    names += name_of(*it);
  }
  refuse(kernel, fmt::format("`{}` has dtype {}, wanted {}", operand, name_of(held), names), where);
}

void check_floating(std::string_view kernel, std::string_view operand, DataType held,
                    std::source_location where) {
  check_dtype(kernel, operand, held, {DataType::float32, DataType::bfloat16, DataType::float16}, where);
}

void check_elements(std::string_view kernel, std::string_view operand, std::int64_t held, std::int64_t wanted,
                    std::source_location where) {
  if (held != wanted) {
    refuse(kernel, fmt::format("`{}` has {} elements, wanted {}", operand, held, wanted), where);
  }
}

void check_tensor(std::string_view kernel, std::string_view operand, const ConstTensorView& held,
                  std::initializer_list<DataType> wanted, std::int64_t elements, std::source_location where) {
  check_dtype(kernel, operand, held.dtype, wanted, where);
  check_elements(kernel, operand, held.elements(), elements, where);
}

void check_rank(std::string_view kernel, std::string_view operand, const Shape& held, int wanted,
                std::source_location where) {
  if (held.rank() != wanted) {
    refuse(kernel,
           fmt::format("`{}` has shape {}, wanted {} dimension{}", operand, held.to_string(), wanted,
                       wanted == 1 ? "" : "s"),
           where);
  }
}

void check_shape(std::string_view kernel, std::string_view operand, const Shape& held, const Shape& wanted,
                 std::source_location where) {
  if (!(held == wanted)) {
    refuse(kernel, fmt::format("`{}` has shape {}, wanted {}", operand, held.to_string(), wanted.to_string()),
           where);
  }
}

Rows check_rows(std::string_view kernel, std::string_view operand, const ConstTensorView& held,
                std::source_location where) {
  if (held.shape.rank() == 0) {
    refuse(kernel, fmt::format("`{}` is a scalar, wanted at least 1 dimension", operand), where);
  }
  const std::int64_t columns = held.shape[held.shape.rank() - 1];
  if (columns == 0) {
    refuse(kernel,
           fmt::format("`{}` has shape {}, wanted a last dimension above 0", operand, held.shape.to_string()),
           where);
  }
  return {held.elements() / columns, columns};
}

void check_workspace(std::string_view kernel, const Workspace& workspace, std::int64_t least,
                     std::source_location where) {
  if (workspace.bytes >= least && workspace.data != nullptr) return;
  refuse(kernel,
         fmt::format("the workspace has {} bytes, wanted at least {} on a GPU",
                     workspace.data == nullptr ? 0 : workspace.bytes, least),
         where);
}

}  // namespace tranche::kernels
