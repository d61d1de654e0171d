#pragma once
/// Element types used in training. docs/internals/numerics.md.

#include <cstdint>
#include <string_view>

#include "tranche/core/dtype.h"

namespace tranche {

/// The format of master weights. split: a bf16 weight and the 16 bits that complete it to an fp32 number
/// (fp32 where the weights are not stored beside the optimizer's state). none: only the bf16 weight.
enum class MasterFormat : std::uint8_t { fp32, split, none };
std::string_view name_of(MasterFormat format);

/// The defaults are those of a Config made in C++; JSON that does not set a dtype means fp32, as in
/// DeepSpeed.
struct PrecisionConfig {
  DataType compute = DataType::bfloat16;
  DataType communication = DataType::bfloat16;  ///< of gradients in messages
  DataType accumulation = DataType::float32;    ///< of the main gradient, which is reduced and accumulated
  DataType moments = DataType::float32;         ///< optimizer state
  MasterFormat master = MasterFormat::fp32;     ///< split and none need bf16 as compute dtype
  bool stochastic_rounding = false;             ///< of updated weights, with MasterFormat::none
};

}  // namespace tranche
