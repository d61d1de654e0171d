#include "tranche/core/dtype.h"

#include <array>
#include <string>
#include <utility>

#include "tranche/core/error.h"

namespace tranche {

namespace {

constexpr std::array<std::pair<std::string_view, DataType>, 13> spellings{{{"fp32", DataType::float32},
                                                                           {"bf16", DataType::bfloat16},
                                                                           {"fp16", DataType::float16},
                                                                           {"fp64", DataType::float64},
                                                                           {"int32", DataType::int32},
                                                                           {"int64", DataType::int64},
                                                                           {"uint16", DataType::uint16},
                                                                           {"uint8", DataType::uint8},
                                                                           {"float32", DataType::float32},
                                                                           {"bfloat16", DataType::bfloat16},
                                                                           {"float16", DataType::float16},
                                                                           {"half", DataType::float16},
                                                                           {"float64", DataType::float64}}};

}  // namespace

void refuse_size_of(DataType dtype) {
  throw LogicError("an element of " + std::string(name_of(dtype)) + " has no size of its own");
}

std::string_view name_of(DataType dtype) {
  for (const auto& [name, value] : spellings) {
    if (value == dtype) return name;
  }
  if (dtype == DataType::block8) return "block8";
  if (dtype == DataType::block8_unsigned) return "block8_unsigned";
  throw InvalidArgument("no data type has the number " + std::to_string(static_cast<int>(dtype)));
}

DataType parse_data_type(std::string_view text) {
  std::string accepted;
  for (const auto& [name, value] : spellings) {
    if (name == text) return value;
    accepted += accepted.empty() ? "" : ", ";
    accepted += name;
  }
  throw ConfigurationError("unknown data type '" + std::string(text) + "'; accepted are " + accepted);
}

}  // namespace tranche
