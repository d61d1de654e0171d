#pragma once
/// The formats of optimizer states (tranche.moments). Private to the library.

#include <string_view>

#include "tranche/kernels/update_rule.h"
#include "tranche/optim/optimizer.h"

namespace tranche::detail {

/// Tensors with fewer elements keep their states in fp32 where block8 is requested, whatever the number of
/// ranks: they take little memory, and norms and biases are among them.
inline constexpr std::int64_t least_block_elements = 4096;

/// Throws InvalidArgument for dtypes other than fp32, bf16 and block8.
void require_state_format(std::string_view optimizer, DataType format);

/// The dtype of a tensor's state; block8_unsigned for states that are never negative.
DataType state_format(DataType asked, const RuleState& state, const Shape& shape);

/// The bytes of all states per element of a large tensor.
double state_bytes_of_element(const Optimizer& optimizer);

}  // namespace tranche::detail
