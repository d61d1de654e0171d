#include "kernels/cpu/copy_columns.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernels/cpu/parallel.h"

namespace tranche::kernels::cpu {

void copy_columns(int threads, const ConstTensorView& from, std::int64_t from_column, const TensorView& to,
                  std::int64_t to_column, std::int64_t columns) {
  if (columns == 0) return;
  const std::int64_t width = size_of(from.dtype), grain = std::max<std::int64_t>(1, parallel_grain / columns);
  parallel_ranges(threads, from.shape[0], grain, [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t r = first; r < first + count; ++r) {
      std::memcpy(static_cast<std::byte*>(to.data) + (r * to.shape[1] + to_column) * width,
                  static_cast<const std::byte*>(from.data) + (r * from.shape[1] + from_column) * width,
                  static_cast<std::size_t>(columns * width));
    }
  });
}

}  // namespace tranche::kernels::cpu
