// Rotary positions. Compiled without contraction: the rotation has the CPU's bits. Sine and cosine are
// computed in fp64 and rounded; if the libraries round differently, a number of the table differs from the
// CPU's by one fp32 unit in the last place.

#include "kernels/cuda/rope.h"

#include <algorithm>

#include "kernels/cuda/elements.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/launch.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int block_threads = 256;
constexpr int most_frequencies = 512;

struct Frequencies {
  float of[most_frequencies];
};

/// A thread computes one angle. Bytes per element: 4 written; bound by fp64 arithmetic.
__global__ void __launch_bounds__(block_threads)
    table_kernel(const Frequencies frequencies, const std::int32_t* positions, const std::int64_t time,
                 const std::int64_t first_position, const std::int64_t rows, const int count,
                 const std::int64_t first, const std::int64_t half, float* table) {
  const std::int64_t item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t row = item / count;
  if (row >= rows) return;
  const auto i = static_cast<int>(item % count);
  const auto position =
      static_cast<float>(positions == nullptr ? first_position + row % time : positions[row]);
  const auto angle = static_cast<double>(position * frequencies.of[i]);
  float* to = table + row * 2 * half + first + i;
  to[0] = static_cast<float>(cos(angle));
  to[half] = static_cast<float>(sin(angle));
}

/// A thread rotates `width` pairs of a head; x runs over the groups of a row's heads, y over rows. Bytes per
/// element: size(x) read and written; the heads of a row share its angles, which stay in cache.
template <int width, class T>
__global__ void __launch_bounds__(block_threads)
    rotate_kernel(const Elements<T> x, const Elements<float> table, const std::int64_t rows, const int heads,
                  const std::int64_t head_dim, const int half, const float sign) {
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int item = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  const int groups = half / width;
  if (row >= rows || item >= heads * groups) return;
  const int group = item % groups * width;
  const std::int64_t low = (row * heads + item / groups) * head_dim + group, angle = row * 2 * half + group;
  float a[width], b[width], cosines[width], sines[width];
  Elements<T>::template widen<width>(x.template load<width>(low), a);
  Elements<T>::template widen<width>(x.template load<width>(low + half), b);
  Elements<float>::template widen<width>(table.template load<width>(angle), cosines);
  Elements<float>::template widen<width>(table.template load<width>(angle + half), sines);
#pragma unroll
  for (int k = 0; k < width; ++k) {
    const float sine = sign * sines[k], before = a[k];
    a[k] = before * cosines[k] - b[k] * sine;
    b[k] = b[k] * cosines[k] + before * sine;
  }
  x.template store<width>(low, a);
  x.template store<width>(low + half, b);
}

}  // namespace

void rope_table(Stream& stream, std::span<const float> frequencies, const ConstTensorView& positions,
                std::int64_t time, const TensorView& table, std::int64_t first_position) {
  const std::int64_t rows = table.shape[0];
  const auto half = static_cast<std::int64_t>(frequencies.size());
  const std::int32_t* given = positions.shape.rank() == 0 ? nullptr : positions.as<std::int32_t>();
  for (std::int64_t first = 0; first < half; first += most_frequencies) {
    const std::int64_t count = std::min<std::int64_t>(most_frequencies, half - first);
    Frequencies part = {};
    std::copy_n(frequencies.begin() + first, count, part.of);
    launch(
        stream, "rope_table", table_kernel,
        {.grid = static_cast<unsigned>(divide_round_up(rows * count, block_threads)), .block = block_threads},
        part, given, time, first_position, rows, static_cast<int>(count), first, half, table.as<float>());
  }
}

void rope(Stream& stream, bool inverse, const ConstTensorView& table, std::int64_t heads,
          std::int64_t head_dim, const TensorView& x) {
  const std::int64_t rows = table.shape[0];
  const std::int64_t half = table.shape[1] / 2;
  if (rows == 0 || half == 0 || heads == 0) return;
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    constexpr int width = 16 / Elements<T>::bytes;
    const bool fits =
        head_dim % width == 0 &&
        row_width(half, width, {demand_of(x.data, sizeof(T), width), demand_of(table.data, 4, width)}) ==
            width;
    const std::int64_t items = heads * (fits ? half / width : half);
    const Tile tile = tile_of(items, block_threads);
    launch(stream, "rope", fits ? rotate_kernel<width, T> : rotate_kernel<1, T>,
           {.grid = dim3(static_cast<unsigned>(divide_round_up(rows, tile.y)),
                         static_cast<unsigned>(divide_round_up(items, tile.x))),
            .block = dim3(static_cast<unsigned>(tile.x), static_cast<unsigned>(tile.y))},
           elements_of<T>(x), elements_of<float>(table), rows, static_cast<int>(heads), head_dim,
           static_cast<int>(half), inverse ? -1.0f : 1.0f);
  });
}

}  // namespace tranche::kernels::cuda
