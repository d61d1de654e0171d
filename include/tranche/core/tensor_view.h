#pragma once
/// Non-owning views of contiguous row-major tensors in any memory. A view knows neither device nor lifetime.

#include "tranche/core/dtype.h"
#include "tranche/core/shape.h"

namespace tranche {

struct ConstTensorView;

/// Writable view: `data` points at shape.elements() contiguous elements of `dtype`.
struct TensorView {
  void* data = nullptr;
  DataType dtype = DataType::float32;
  Shape shape;

  std::int64_t elements() const noexcept { return shape.elements(); }
  std::int64_t bytes() const noexcept { return bytes_of(dtype, shape.elements()); }
  /// Typed pointer; throws InvalidArgument when T is not the view's dtype.
  template <typename T>
  T* as(std::source_location where = std::source_location::current()) const;
  /// The same elements under another shape; throws InvalidArgument when the element counts differ.
  TensorView reshaped(const Shape& to) const;
  /// Elements [first, first + count) as a one-dimensional view; throws InvalidArgument outside the view, and
  /// where `first` is within a block.
  TensorView slice(std::int64_t first, std::int64_t count) const;
};

/// Read-only view.
struct ConstTensorView {
  const void* data = nullptr;
  DataType dtype = DataType::float32;
  Shape shape;

  ConstTensorView() = default;
  ConstTensorView(const void* pointer, DataType type, Shape extents)
      : data(pointer), dtype(type), shape(extents) {}
  // NOLINTNEXTLINE(google-explicit-constructor): whoever may write may read
  ConstTensorView(const TensorView& view) : data(view.data), dtype(view.dtype), shape(view.shape) {}

  std::int64_t elements() const noexcept { return shape.elements(); }
  std::int64_t bytes() const noexcept { return bytes_of(dtype, shape.elements()); }
  template <typename T>
  const T* as(std::source_location where = std::source_location::current()) const;
  ConstTensorView reshaped(const Shape& to) const;
  ConstTensorView slice(std::int64_t first, std::int64_t count) const;
};

/// Throws InvalidArgument "wanted dtype fp32, view holds bf16" unless they are equal.
void require_dtype(DataType wanted, DataType held, std::source_location where);

template <typename T>
T* TensorView::as(std::source_location where) const {
  require_dtype(data_type_of<T>(), dtype, where);
  return static_cast<T*>(data);
}
template <typename T>
const T* ConstTensorView::as(std::source_location where) const {
  require_dtype(data_type_of<T>(), dtype, where);
  return static_cast<const T*>(data);
}

}  // namespace tranche
