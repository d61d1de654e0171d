#include "optim/state_format.h"

#include <fmt/core.h>

#include "tranche/core/error.h"

namespace tranche::detail {

void require_state_format(std::string_view optimizer, DataType format) {
  if (format == DataType::float32 || format == DataType::bfloat16 || format == DataType::block8) return;
  throw InvalidArgument(
      fmt::format("{}: moments can be kept in fp32, bf16 or block8, not {}", optimizer, name_of(format)));
}

DataType state_format(DataType asked, const RuleState& state, const Shape& shape) {
  if (asked != DataType::block8) return asked;
  if (shape.elements() < least_block_elements) return DataType::float32;
  return state.not_negative ? DataType::block8_unsigned : DataType::block8;
}

double state_bytes_of_element(const Optimizer& optimizer) {
  TrainableTensor large;
  large.shape = Shape{least_block_elements};
  double bytes = 0;
  for (const OptimizerStateTensor& state : optimizer.state(large)) {
    bytes += static_cast<double>(bytes_of(state.dtype, least_block_elements)) / least_block_elements;
  }
  return bytes;
}

}  // namespace tranche::detail
