#include "tranche/core/shape.h"

#include <algorithm>
#include <limits>

namespace tranche {

namespace {

/// Element counts stay below this, so that a count times the widest element (8 bytes) never overflows.
constexpr std::int64_t max_elements = std::numeric_limits<std::int64_t>::max() / 8;

std::string list_of(std::span<const std::int64_t> extents) {
  std::string text = "[";
  for (std::size_t i = 0; i < extents.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(extents[i]);
  }
  return text + "]";
}

}  // namespace

Shape::Shape(std::initializer_list<std::int64_t> extents)
    : Shape(std::span<const std::int64_t>(extents.begin(), extents.size())) {}

Shape::Shape(std::span<const std::int64_t> extents) {
  if (extents.size() > static_cast<std::size_t>(max_rank)) {
    throw InvalidArgument("shape " + list_of(extents) + " has " + std::to_string(extents.size()) +
                          " dimensions; at most " + std::to_string(max_rank) + " are supported");
  }
  bool empty = false;
  for (const std::int64_t extent : extents) {
    if (extent < 0) throw InvalidArgument("shape " + list_of(extents) + " has a negative extent");
    empty = empty || extent == 0;
  }
  rank_ = static_cast<int>(extents.size());
  std::copy(extents.begin(), extents.end(), extents_.begin());
  if (empty) {
    elements_ = 0;
    return;
  }
  for (const std::int64_t extent : extents) {
    if (extent > max_elements / elements_) {
      throw InvalidArgument("shape " + list_of(extents) + " has more than " + std::to_string(max_elements) +
                            " elements");
    }
    elements_ *= extent;
  }
}

std::int64_t Shape::operator[](int axis) const {
  if (axis < 0 || axis >= rank_) {
    throw InvalidArgument("axis " + std::to_string(axis) + " is out of range for shape " + to_string());
  }
  return extents_[static_cast<std::size_t>(axis)];
}

std::string Shape::to_string() const {
  return list_of(extents());
}

std::int64_t checked_multiply(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw InvalidArgument(std::to_string(a) + " * " + std::to_string(b) + " overflows 64-bit integers");
  }
  return product;
}

std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) {
    throw InvalidArgument(std::to_string(a) + " + " + std::to_string(b) + " overflows 64-bit integers");
  }
  return sum;
}

}  // namespace tranche
