#pragma once
/// Element types of a training's numbers. docs/internals/numerics.md.

#include <cstdint>
#include <string_view>

#include "tranche/core/dtype.h"

namespace tranche {

/// The format of master weights. split: a bf16 weight and the 16 bits that make an fp32 number of it (fp32
/// where the weights do not lie beside the optimizer's state). none: the bf16 weight alone.
enum class MasterFormat : std::uint8_t { fp32, split, none };
std::string_view name_of(MasterFormat format);

/// The values are those of a Config made in C++; JSON that does not choose a dtype means fp32, as in
/// DeepSpeed.
struct PrecisionConfig {
  DataType compute = DataType::bfloat16;
  DataType communication = DataType::bfloat16;  ///< of gradients as they are sent
  DataType accumulation = DataType::float32;    ///< of the main gradient, which is reduced and accumulated
  DataType moments = DataType::float32;         ///< optimizer state
  MasterFormat master = MasterFormat::fp32;     ///< others only with bf16 as compute dtype
  bool stochastic_rounding = false;             ///< of updated weights, with MasterFormat::none
};

}  // namespace tranche
