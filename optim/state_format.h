#pragma once
/// The formats of optimizer states (tranche.moments). Private to the library.

#include <string_view>

#include "tranche/kernels/update_rule.h"
#include "tranche/optim/optimizer.h"

namespace tranche::detail {

/// Tensors with fewer elements keep their states in fp32 where block8 is asked for, whatever the ranks: they
/// take little memory, and norms and biases are among them.
inline constexpr std::int64_t least_block_elements = 4096;

/// Throws InvalidArgument for what is neither fp32, bf16 nor block8.
void require_state_format(std::string_view optimizer, DataType format);

/// The dtype of a state of a tensor; block8_unsigned for one that is never below 0.
DataType state_format(DataType asked, const RuleState& state, const Shape& shape);

/// Bytes of an element of a large tensor in all states.
double state_bytes_of_element(const Optimizer& optimizer);

}  // namespace tranche::detail
