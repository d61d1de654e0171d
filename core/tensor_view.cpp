#include "tranche/core/tensor_view.h"

#include <string>
#include <utility>

namespace tranche {

namespace {

void require_same_elements(const Shape& from, const Shape& to) {
  if (from.elements() == to.elements()) return;
  throw InvalidArgument("cannot view shape " + from.to_string() + " (" + std::to_string(from.elements()) +
                        " elements) as " + to.to_string() + " (" + std::to_string(to.elements()) +
                        " elements)");
}

void require_slice(const Shape& shape, DataType dtype, std::int64_t first, std::int64_t count) {
  const std::int64_t elements = shape.elements();
  if (first % block_elements_of(dtype) != 0) {
    throw InvalidArgument("element " + std::to_string(first) + " of " + std::string(name_of(dtype)) +
                          " does not begin a block of " + std::to_string(block_elements_of(dtype)));
  }
  if (first >= 0 && count >= 0 && first <= elements && count <= elements - first) return;
  throw InvalidArgument("slice of " + std::to_string(count) + " elements from element " +
                        std::to_string(first) + " does not lie in a view of shape " + shape.to_string() +
                        " (" + std::to_string(elements) + " elements)");
}

/// A null pointer stays null (views of the meta device have no address).
template <typename Byte, typename Pointer>
Pointer advance(Pointer data, DataType dtype, std::int64_t elements) {
  return data == nullptr ? data : static_cast<Byte*>(data) + bytes_of(dtype, elements);
}

}  // namespace

void require_dtype(DataType wanted, DataType held, std::source_location where) {
  if (wanted == held) return;
  throw InvalidArgument(
      "wanted dtype " + std::string(name_of(wanted)) + ", view holds " + std::string(name_of(held)), where);
}

TensorView TensorView::reshaped(const Shape& to) const {
  require_same_elements(shape, to);
  return {data, dtype, to};
}

TensorView TensorView::slice(std::int64_t first, std::int64_t count) const {
  require_slice(shape, dtype, first, count);
  return {advance<std::byte>(data, dtype, first), dtype, Shape{count}};
}

ConstTensorView ConstTensorView::reshaped(const Shape& to) const {
  require_same_elements(shape, to);
  return {data, dtype, to};
}

ConstTensorView ConstTensorView::slice(std::int64_t first, std::int64_t count) const {
  require_slice(shape, dtype, first, count);
  return {advance<const std::byte>(data, dtype, first), dtype, Shape{count}};
}

}  // namespace tranche
