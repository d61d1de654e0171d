#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/embedding.cpp"
#include <hwy/foreach_target.h>
// Must follow foreach_target.h.
#include <algorithm>
#include <cstdint>

#include "hwy/cache_control.h"
#include "kernels/cpu/embedding.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row-inl.h"
#include "tranche/core/shape.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// Prefetches a row, which may lie anywhere in a table.
HWY_INLINE void fetch(const void* from, std::int64_t bytes) {
  constexpr std::int64_t line = 64;
  for (std::int64_t i = 0; i < bytes; i += line) hwy::Prefetch(static_cast<const char*>(from) + i);
}

template <class T>
void forward_row(const EmbeddingForward& call, std::int64_t row) {
  const auto token_row = [&](std::int64_t r) {
    return static_cast<const T*>(call.token_table) + (call.tokens[r] - call.range.first) * call.width;
  };
  const std::int64_t bytes = call.width * static_cast<std::int64_t>(sizeof(T));
  T* out = static_cast<T*>(call.out) + row * call.width;
  const std::int64_t ahead = row + embedding_rows_ahead;
  if (ahead < call.batch * call.time && call.range.has(call.tokens[ahead])) fetch(token_row(ahead), bytes);
  if (!call.range.has(call.tokens[row])) return static_cast<void>(std::fill_n(out, call.width, T{}));
  const T* token = token_row(row);
  if (!call.positions) {
    call.streaming ? stream_copy(token, bytes, out) : static_cast<void>(std::copy_n(token, call.width, out));
    return;
  }
  const std::int64_t at = call.given == nullptr ? row % call.time : call.given[row];
  const T* position = static_cast<const T*>(call.position_table) + at * call.width;
  for_vectors(call.width, [&](std::int64_t i, std::int64_t lanes) {
    store_at(hn::Add(load_at(token, i, lanes), load_at(position, i, lanes)), out, i, lanes);
  });
}

/// The gradients of columns [first, first + width). One thread processes all rows for its columns, so every
/// sum runs in ascending (b, t) order.
template <class T>
void backward_columns(const EmbeddingBackward& call, std::int64_t first, std::int64_t width) {
  const std::int64_t rows = call.batch * call.time;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (row + embedding_rows_ahead < rows) {
      const std::int64_t token = call.tokens[row + embedding_rows_ahead];
      if (call.range.has(token)) {
        fetch(call.token_gradient + (token - call.range.first) * call.width + first,
              width * std::int64_t{sizeof(float)});
      }
    }
    if (!call.range.has(call.tokens[row])) continue;
    const T* gradient = static_cast<const T*>(call.d_out) + row * call.width + first;
    float* token = call.token_gradient + (call.tokens[row] - call.range.first) * call.width + first;
    float* position =
        call.positions ? call.position_gradient + row % call.time * call.width + first : nullptr;
    for_vectors(width, [&](std::int64_t i, std::int64_t lanes) {
      const FloatVector value = load_at(gradient, i, lanes);
      store_at(hn::Add(load_at(token, i, lanes), value), token, i, lanes);
      if (position != nullptr) store_at(hn::Add(load_at(position, i, lanes), value), position, i, lanes);
    });
  }
}

void forward(const EmbeddingForward& call, std::int64_t first, std::int64_t count) {
  with_floating(call.dtype, [&](auto type) {
    for (std::int64_t row = first; row < first + count; ++row) forward_row<decltype(type)>(call, row);
  });
}

void backward(const EmbeddingBackward& call, std::int64_t first, std::int64_t width) {
  with_floating(call.dtype, [&](auto type) { backward_columns<decltype(type)>(call, first, width); });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(forward);
HWY_EXPORT(backward);

void embedding_forward(const EmbeddingForward& given) {
  EmbeddingForward call = given;
  const std::int64_t row_bytes = call.width * size_of(call.dtype), bytes = call.batch * call.time * row_bytes;
  call.streaming = !call.positions && row_bytes % 64 == 0 && is_streamed(call.out, bytes, {});
  const auto run = HWY_DYNAMIC_DISPATCH(forward);
  parallel_ranges(call.threads, call.batch * call.time, row_grain(call.width),
                  [&](std::int64_t first, std::int64_t count) {
                    run(call, first, count);
                    if (call.streaming) hwy::FlushStream();
                  });
}

void embedding_backward(const EmbeddingBackward& call) {
  const auto run = HWY_DYNAMIC_DISPATCH(backward);
  parallel_ranges(call.threads, call.width, column_grain(call.threads, call.width, 0),
                  [&](std::int64_t first, std::int64_t count) { run(call, first, count); });
}

}  // namespace tranche::kernels::cpu
#endif
