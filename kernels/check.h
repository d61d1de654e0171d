#pragma once
/// Checks of kernels' arguments. Every text names the kernel and the operand.

#include <initializer_list>
#include <source_location>
#include <string_view>

#include "tranche/core/tensor_view.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels {

/// False for an optional operand that is left out: `{}`.
inline bool is_given(const ConstTensorView& operand) {
  return operand.shape.rank() > 0;
}

/// Throws InvalidArgument "<kernel>: <what>".
[[noreturn]] void refuse(std::string_view kernel, std::string_view what,
                         std::source_location where = std::source_location::current());

/// Throws "cast: `to` has dtype int32, wanted fp32, bf16 or fp16" unless the dtype is one of `wanted`.
void check_dtype(std::string_view kernel, std::string_view operand, DataType held,
                 std::initializer_list<DataType> wanted,
                 std::source_location where = std::source_location::current());
/// Throws unless the dtype is fp32, bf16 or fp16.
void check_floating(std::string_view kernel, std::string_view operand, DataType held,
                    std::source_location where = std::source_location::current());
/// Throws "cast: `to` has 7 elements, wanted 8" unless the numbers are equal.
void check_elements(std::string_view kernel, std::string_view operand, std::int64_t held, std::int64_t wanted,
                    std::source_location where = std::source_location::current());
/// Checks both: the dtype is one of `wanted`, the number of elements is `elements`.
void check_tensor(std::string_view kernel, std::string_view operand, const ConstTensorView& held,
                  std::initializer_list<DataType> wanted, std::int64_t elements,
                  std::source_location where = std::source_location::current());
/// Throws "add_bias: `x` has shape [7], wanted 2 dimensions" for another number of dimensions.
void check_rank(std::string_view kernel, std::string_view operand, const Shape& held, int wanted,
                std::source_location where = std::source_location::current());
/// Throws "matmul: `c` has shape [2, 3], wanted [2, 4]" for another shape.
void check_shape(std::string_view kernel, std::string_view operand, const Shape& held, const Shape& wanted,
                 std::source_location where = std::source_location::current());

/// A tensor as rows of its last dimension. rows_of() refuses a scalar, and "layer_norm_forward: `x` has shape
/// [6, 0], wanted a last dimension above 0".
struct Rows {
  std::int64_t rows = 0, columns = 0;
};
Rows check_rows(std::string_view kernel, std::string_view operand, const ConstTensorView& held,
                std::source_location where = std::source_location::current());

/// Throws "bias_gradient: the workspace has 0 bytes, wanted at least 8 on a GPU" if it is smaller.
void check_workspace(std::string_view kernel, const Workspace& workspace, std::int64_t least,
                     std::source_location where = std::source_location::current());

}  // namespace tranche::kernels
