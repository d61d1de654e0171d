#pragma once
/// Moves 16-bit tiles between global memory, shared memory and registers for the flash attention kernels.
/// This is device code; attention_geometry.h defines the positions.

#include "kernels/attention_operands.h"
#include "kernels/cuda/attention_geometry.h"
#include "kernels/cuda/simt.h"

namespace tranche::kernels::cuda {

inline constexpr unsigned whole_warp = 0xffffffffu;

__device__ __forceinline__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % warp_size;
}
__device__ __forceinline__ int warp_of_thread() {
  return static_cast<int>(threadIdx.x) / warp_size;
}

/// The rows of a checked operand as elements of T.
template <class T>
HeadRows<const T> rows_of(const HeadRows<const void>& rows) {
  return {static_cast<const T*>(rows.data), rows.stride};
}
template <class T>
HeadRows<T> rows_of(const HeadRows<void>& rows) {
  return {static_cast<T*>(rows.data), rows.stride};
}

/// Keys and values with equal row distances: a value is `to_value` elements after its key.
template <class T>
struct KeyRows {
  const T* data;
  std::int64_t stride, to_value;
};
template <class T>
KeyRows<T> key_rows_of(const AttentionOperands& call) {
  const auto key = reinterpret_cast<std::intptr_t>(call.parts[1].data),
             value = reinterpret_cast<std::intptr_t>(call.parts[2].data);
  return {static_cast<const T*>(call.parts[1].data), call.parts[1].stride,
          (value - key) / static_cast<std::intptr_t>(sizeof(T))};
}

/// The window and the documents of all batch entries, for kernels that are compiled to support them.
struct FlashMask {
  std::int64_t window;
  const std::int32_t* document_begin;
  int time;

  /// The mask of the batch entry whose first token is number `row`.
  __device__ __forceinline__ AttentionMask of(std::int64_t row) const {
    return {window, document_begin == nullptr ? nullptr : document_begin + row};
  }
  /// The first key that a query sees; for queries beyond the last one, the last one's.
  __device__ __forceinline__ int first(std::int64_t row, int query) const {
    return static_cast<int>(of(row).first(query < time ? query : time - 1));
  }
};

/// Starts copying `rows` rows of `head` elements, `stride` apart in global memory; rows from `valid` on
/// become zeros. 8 or 16 neighbouring lanes read one row: 128 or 256 bytes at once.
template <int head, int rows, int threads, class T>
__device__ __forceinline__ void load_tile(T* shared, const T* global, std::int64_t stride, int valid) {
  constexpr int chunks = head / 8, step = threads / chunks;
  static_assert(threads % chunks == 0 && rows % step == 0);
  const int first = static_cast<int>(threadIdx.x) / chunks, chunk = static_cast<int>(threadIdx.x) % chunks;
  const int left = valid - first;
  T* to = shared + place_in_tile(first, chunk, head);
  const T* from = global + first * stride + chunk * 8;
#pragma unroll
  for (int row = 0; row < rows; row += step) {
    cp_async_16(to + place_in_tile(row, 0, head), from, row < left);
    from += step * stride;
  }
}

/// Writes a warp's rows from shared memory to global memory, those below `valid`.
template <int head, int rows, class T>
__device__ __forceinline__ void store_rows(T* global, std::int64_t stride, const T* shared, int first_row,
                                           int valid) {
  constexpr int chunks = head / 8;
#pragma unroll
  for (int i = 0; i < rows * chunks / warp_size; ++i) {
    const int at = i * warp_size + lane_of_thread();
    const int row = first_row + at / chunks, chunk = at % chunks;
    if (row < valid) {
      *reinterpret_cast<Vector16*>(global + row * stride + chunk * 8) =
          *reinterpret_cast<const Vector16*>(shared + place_in_tile(row, chunk, head));
    }
  }
}

/// Loads rows [row, row + 16), columns [16 step, 16 step + 16) as the left operand of an mma.
template <int head, class T>
__device__ __forceinline__ void load_left(std::uint32_t (&fragment)[4], const T* tile, int row, int step) {
  const int lane = lane_of_thread();
  load_matrix_x4<false>(fragment, tile + place_in_tile(row + lane % 16, 2 * step + lane / 16, head));
}
/// Loads the same elements as a right operand [16 columns deep, 16 rows wide]: 0 and 1 are for rows 0-7, 2
/// and 3 for rows 8-15.
template <int head, class T>
__device__ __forceinline__ void load_right(std::uint32_t (&fragment)[4], const T* tile, int row, int step) {
  const int lane = lane_of_thread();
  load_matrix_x4<false>(fragment,
                        tile + place_in_tile(row + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2, head));
}
/// Loads the same elements as a right operand [16 rows deep, 16 columns wide]: 0 and 1 are for columns 0-7, 2
/// and 3 for columns 8-15.
template <int head, class T>
__device__ __forceinline__ void load_right_transposed(std::uint32_t (&fragment)[4], const T* tile, int row,
                                                      int step) {
  const int lane = lane_of_thread();
  load_matrix_x4<true>(fragment, tile + place_in_tile(row + lane % 16, 2 * step + lane / 16, head));
}

/// Converts two neighbouring 16x8 results to a left operand 16x16.
template <class T>
__device__ __forceinline__ void as_left(std::uint32_t (&fragment)[4], const float (&low)[4],
                                        const float (&high)[4]) {
  fragment[0] = pack_two<T>(low[0], low[1]);
  fragment[1] = pack_two<T>(low[2], low[3]);
  fragment[2] = pack_two<T>(high[0], high[1]);
  fragment[3] = pack_two<T>(high[2], high[3]);
}

/// Stores a 16x8 result, rounded, at (row, 8 chunk) of a tile.
template <int head, class T>
__device__ __forceinline__ void put_result(T* tile, int row, int chunk, const float (&result)[4],
                                           float factor_low, float factor_high) {
  const int lane = lane_of_thread(), g = lane / 4, t = lane % 4;
  *reinterpret_cast<std::uint32_t*>(tile + place_in_tile(row + g, chunk, head) + 2 * t) =
      pack_two<T>(result[0] * factor_low, result[1] * factor_low);
  *reinterpret_cast<std::uint32_t*>(tile + place_in_tile(row + g + 8, chunk, head) + 2 * t) =
      pack_two<T>(result[2] * factor_high, result[3] * factor_high);
}

/// The maximum over the four lanes that hold one row of a result.
__device__ __forceinline__ float row_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(whole_warp, x, 1));
  return fmaxf(x, __shfl_xor_sync(whole_warp, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(whole_warp, x, 1);
  return x + __shfl_xor_sync(whole_warp, x, 2);
}

}  // namespace tranche::kernels::cuda
