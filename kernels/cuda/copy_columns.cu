// Columns of a matrix copied into another: the runtime's copy of two dimensions, which can be captured.

#include "kernels/cuda/copy_columns.h"

#include "kernels/cuda/launch.h"

namespace tranche::kernels::cuda {

void copy_columns(Stream& stream, const ConstTensorView& from, std::int64_t from_column, const TensorView& to,
                  std::int64_t to_column, std::int64_t columns) {
  if (columns == 0 || from.shape[0] == 0) return;
  const std::int64_t width = size_of(from.dtype);
  const auto bytes = [&](std::int64_t elements) { return static_cast<std::size_t>(elements * width); };
  check_cuda(cudaMemcpy2DAsync(static_cast<std::byte*>(to.data) + bytes(to_column), bytes(to.shape[1]),
                               static_cast<const std::byte*>(from.data) + bytes(from_column),
                               bytes(from.shape[1]), bytes(columns), static_cast<std::size_t>(from.shape[0]),
                               cudaMemcpyDefault, native(stream)),
             "copy_columns");
}

}  // namespace tranche::kernels::cuda
