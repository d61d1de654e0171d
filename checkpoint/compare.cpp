#include "checkpoint/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace tranche::checkpoint {

namespace {

constexpr std::int64_t stride = std::int64_t{1} << 18;

void compare_values(Reader& first, Reader& second, const StoredTensor& tensor, TensorDifference& difference) {
  const std::int64_t elements = tensor.shape.elements();
  std::vector<float> a(static_cast<std::size_t>(std::min(stride, elements)));
  std::vector<float> b(a.size());
  for (std::int64_t begin = 0; begin < elements; begin += stride) {
    const std::int64_t end = std::min(begin + stride, elements);
    first.read_tensor(tensor.name, difference.kind, {begin, end}, DataType::float32, a.data());
    second.read_tensor(tensor.name, difference.kind, {begin, end}, DataType::float32, b.data());
    for (std::size_t i = 0; i < static_cast<std::size_t>(end - begin); ++i) {
      if (std::bit_cast<std::uint32_t>(a[i]) == std::bit_cast<std::uint32_t>(b[i])) continue;
      if (difference.differing++ == 0) {
        difference.first = begin + static_cast<std::int64_t>(i);
        difference.first_in_first = a[i];
        difference.first_in_second = b[i];
      }
      const double apart = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
      difference.largest =
          std::isnan(apart) ? std::numeric_limits<double>::infinity() : std::max(difference.largest, apart);
    }
  }
}

bool has_kind(const Reader& reader, const StoredTensor& tensor, const std::string& kind) {
  return reader.layout().find_section(kind, tensor.frozen, tensor.state_class) >= 0;
}

}  // namespace

Comparison compare(Reader& first, Reader& second) {
  using What = TensorDifference::What;
  Comparison comparison;
  const auto add = [&](const std::string& tensor, const std::string& kind, What what) {
    TensorDifference difference;
    difference.tensor = tensor;
    difference.kind = kind;
    difference.what = what;
    comparison.differences.push_back(std::move(difference));
  };
  for (const StoredTensor& tensor : first.tensors()) {
    const StoredTensor* other = second.find(tensor.name);
    for (const std::string& kind : first.kinds(tensor)) {
      if (other == nullptr || !has_kind(second, *other, kind)) {
        add(tensor.name, kind, What::only_in_first);
      } else if (!(tensor.shape == other->shape)) {
        add(tensor.name, kind, What::shape);
      } else {
        TensorDifference difference;
        difference.tensor = tensor.name;
        difference.kind = kind;
        compare_values(first, second, tensor, difference);
        ++comparison.compared;
        if (difference.differing > 0) comparison.differences.push_back(std::move(difference));
      }
    }
  }
  for (const StoredTensor& tensor : second.tensors()) {
    const StoredTensor* other = first.find(tensor.name);
    for (const std::string& kind : second.kinds(tensor)) {
      if (other == nullptr || !has_kind(first, *other, kind)) add(tensor.name, kind, What::only_in_second);
    }
  }
  return comparison;
}

std::string describe(const TensorDifference& difference) {
  const std::string name = difference.kind + " of " + difference.tensor;
  switch (difference.what) {
    case TensorDifference::What::shape:
      return name + ": its shapes differ";
    case TensorDifference::What::only_in_first:
      return name + ": only in the first";
    case TensorDifference::What::only_in_second:
      return name + ": only in the second";
    case TensorDifference::What::values:
      break;
  }
  return fmt::format("{}: {} element{} differ{}, by at most {}; the first is element {}: {} and {}", name,
                     difference.differing, difference.differing == 1 ? "" : "s",
                     difference.differing == 1 ? "s" : "", difference.largest, difference.first,
                     difference.first_in_first, difference.first_in_second);
}

}  // namespace tranche::checkpoint
