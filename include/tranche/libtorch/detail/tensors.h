#pragma once
/// Tensors inside the arguments and results of modules, and the correspondence of Tranche's and LibTorch's
/// dtypes.

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tranche/core/dtype.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/core/tensor_view.h"

namespace tranche::libtorch::detail {

template <class T>
struct HoldsValues : std::false_type {};
template <class T>
struct HoldsValues<std::vector<T>> : std::bool_constant<!std::is_same_v<T, bool>> {};
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
struct IsTuple : std::false_type {};
template <class... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct IsTuple<std::pair<A, B>> : std::true_type {};

/// Calls `function` with every defined tensor in `value`, in a fixed order. It looks into vectors, tuples,
/// pairs and optionals; other types count as containing none.
template <class Value, class Function>
void for_each_tensor(Value& value, Function&& function) {
  using Plain = std::remove_const_t<Value>;
  if constexpr (std::is_same_v<Plain, at::Tensor>) {
    if (value.defined()) function(value);
  } else if constexpr (HoldsValues<Plain>::value) {
    for (auto& element : value) for_each_tensor(element, function);
  } else if constexpr (IsOptional<Plain>::value) {
    if (value) for_each_tensor(*value, function);
  } else if constexpr (IsTuple<Plain>::value) {
    std::apply([&](auto&... parts) { (for_each_tensor(parts, function), ...); }, value);
  }
}

inline at::ScalarType scalar_type(DataType type) {
  switch (type) {
    case DataType::bfloat16:
      return at::kBFloat16;
    case DataType::float16:
      return at::kHalf;
    default:
      return at::kFloat;
  }
}

inline Shape shape_of(const at::Tensor& tensor) {
  return Shape(std::span<const std::int64_t>(tensor.sizes().data(), static_cast<std::size_t>(tensor.dim())));
}

/// A view of a contiguous tensor in host memory; bool counts as bytes. Throws InvalidArgument that names
/// `name` for a dtype that checkpoints do not support.
inline TensorView view_of(const at::Tensor& tensor, const std::string& name) {
  const auto view = [&](DataType dtype) { return TensorView{tensor.data_ptr(), dtype, shape_of(tensor)}; };
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return view(DataType::float32);
    case at::kDouble:
      return view(DataType::float64);
    case at::kBFloat16:
      return view(DataType::bfloat16);
    case at::kHalf:
      return view(DataType::float16);
    case at::kInt:
      return view(DataType::int32);
    case at::kLong:
      return view(DataType::int64);
    case at::kByte:
    case at::kBool:
      return view(DataType::uint8);
    default:
      throw InvalidArgument("buffer " + name + " has dtype " + c10::toString(tensor.scalar_type()) +
                            ", which checkpoints do not hold; use float, double, a 16-bit float, int, long, "
                            "uint8 or bool");
  }
}

/// FNV-1a over 8-byte words, with which ranks compare values.
inline std::string hash_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().to(at::kCPU).contiguous();
  const auto* bytes = static_cast<const unsigned char*>(values.data_ptr());
  const std::size_t count = values.nbytes();
  std::uint64_t hash = 1469598103934665603ull;
  for (std::size_t i = 0; i < count; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min<std::size_t>(8, count - i));
    hash = (hash ^ word) * 1099511628211ull;
    hash ^= hash >> 32;
  }
  return std::to_string(hash);
}

}  // namespace tranche::libtorch::detail
