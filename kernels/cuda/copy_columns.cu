// Copies columns of a matrix into another with the runtime's two-dimensional copy, which can be captured.

#include "kernels/cuda/copy_columns.h"

#include <algorithm>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.h"

namespace tranche::kernels::cuda {

namespace {

/// The largest distance between rows, in bytes, that the runtime's copy supports (cudaDevAttrMaxPitch).
constexpr std::int64_t most_pitch = (std::int64_t{1} << 31) - 1;

}  // namespace

void copy_columns(Stream& stream, const ConstTensorView& from, std::int64_t from_column, const TensorView& to,
                  std::int64_t to_column, std::int64_t columns) {
  if (columns == 0 || from.shape[0] == 0) return;
  const std::int64_t widest = std::max(from.shape[1], to.shape[1]) * size_of(from.dtype);
  if (widest > most_pitch) {  // a matrix with rows so far apart has few rows
    for (std::int64_t row = 0; row < from.shape[0]; ++row) {
      copy(stream, from.slice(row * from.shape[1] + from_column, columns),
           to.slice(row * to.shape[1] + to_column, columns));
    }
    return;
  }
  const std::int64_t width = size_of(from.dtype);
  const auto bytes = [&](std::int64_t elements) { return static_cast<std::size_t>(elements * width); };
  check_cuda(cudaMemcpy2DAsync(static_cast<std::byte*>(to.data) + bytes(to_column), bytes(to.shape[1]),
                               static_cast<const std::byte*>(from.data) + bytes(from_column),
                               bytes(from.shape[1]), bytes(columns), static_cast<std::size_t>(from.shape[0]),
                               cudaMemcpyDefault, native(stream)),
             "copy_columns");
}

}  // namespace tranche::kernels::cuda
