#pragma once
/// Shapes of tensors and checked integer arithmetic. All sizes are std::int64_t.

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "tranche/core/error.h"

namespace tranche {

/// Up to six extents of 0 or more, row-major, outermost first. Rank 0 is a scalar with one element. Throws
/// InvalidArgument for more extents, and for a negative one.
class Shape {
 public:
  static constexpr int max_rank = 6;
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> extents);
  explicit Shape(std::span<const std::int64_t> extents);

  int rank() const noexcept { return rank_; }
  /// Extent of dimension `axis`; throws InvalidArgument when out of range.
  std::int64_t operator[](int axis) const;
  std::span<const std::int64_t> extents() const noexcept {
    return {extents_.data(), static_cast<std::size_t>(rank_)};
  }
  /// Number of elements: the product of the extents (checked for overflow at construction).
  std::int64_t elements() const noexcept { return elements_; }
  /// "[2, 3, 4]".
  std::string to_string() const;
  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  std::array<std::int64_t, max_rank> extents_{};
  int rank_ = 0;
  std::int64_t elements_ = 1;
};

/// a * b; throws InvalidArgument on overflow.
std::int64_t checked_multiply(std::int64_t a, std::int64_t b);
/// a + b; throws InvalidArgument on overflow.
std::int64_t checked_add(std::int64_t a, std::int64_t b);

/// Converts between integer types; throws InvalidArgument when the target type cannot hold the value.
template <typename To, typename From>
To narrow(From value, std::source_location where = std::source_location::current()) {
  static_assert(std::is_integral_v<To> && std::is_integral_v<From>);
  const To converted = static_cast<To>(value);
  if (static_cast<From>(converted) != value || ((converted < To{}) != (value < From{}))) {
    throw InvalidArgument("integer " + std::to_string(value) + " does not fit the target type", where);
  }
  return converted;
}

/// Smallest multiple of `multiple` that is >= value (both non-negative, multiple > 0).
constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr std::int64_t divide_round_up(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace tranche
