#include "checkpoint/convert.h"

#include <cstddef>
#include <cstring>
#include <string>

#include "tranche/core/error.h"

namespace tranche::checkpoint {

namespace {

template <typename From, typename To>
void convert_loop(const void* source, void* target, std::int64_t elements) {
  const auto* in = static_cast<const std::byte*>(source);
  auto* out = static_cast<std::byte*>(target);
  for (std::int64_t i = 0; i < elements; ++i) {
    From from;
    std::memcpy(&from, in + i * static_cast<std::int64_t>(sizeof from), sizeof from);
    const To to = from_float<To>(to_float(from));
    std::memcpy(out + i * static_cast<std::int64_t>(sizeof to), &to, sizeof to);
  }
}

template <typename From>
bool convert_from(const void* source, DataType to, void* target, std::int64_t elements) {
  switch (to) {
    case DataType::float32:
      convert_loop<From, float>(source, target, elements);
      return true;
    case DataType::bfloat16:
      convert_loop<From, bfloat16>(source, target, elements);
      return true;
    case DataType::float16:
      convert_loop<From, float16>(source, target, elements);
      return true;
    default:
      return false;
  }
}

}  // namespace

void convert(DataType from, const void* source, DataType to, void* target, std::int64_t elements) {
  bool done = false;
  if (from == to) {
    std::memcpy(target, source, static_cast<std::size_t>(elements * size_of(from)));
    done = true;
  } else if (from == DataType::float32) {
    done = convert_from<float>(source, to, target, elements);
  } else if (from == DataType::bfloat16) {
    done = convert_from<bfloat16>(source, to, target, elements);
  } else if (from == DataType::float16) {
    done = convert_from<float16>(source, to, target, elements);
  }
  if (!done) {
    throw InvalidArgument("checkpoints do not convert " + std::string(name_of(from)) + " to " +
                          std::string(name_of(to)));
  }
}

}  // namespace tranche::checkpoint
