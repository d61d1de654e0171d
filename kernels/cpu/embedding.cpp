#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/embedding.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <algorithm>

#include "kernels/cpu/embedding.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row-inl.h"
#include "tranche/core/shape.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

template <class T>
void forward_row(const EmbeddingForward& call, std::int64_t row) {
  const T* token = static_cast<const T*>(call.token_table) + call.tokens[row] * call.width;
  T* out = static_cast<T*>(call.out) + row * call.width;
  if (!call.positions) {
    std::copy_n(token, call.width, out);
    return;
  }
  const std::int64_t at = call.given == nullptr ? row % call.time : call.given[row];
  const T* position = static_cast<const T*>(call.position_table) + at * call.width;
  for_vectors(call.width, [&](std::int64_t i, std::int64_t lanes) {
    store_at(hn::Add(load_at(token, i, lanes), load_at(position, i, lanes)), out, i, lanes);
  });
}

/// The gradients of columns [first, first + width). A thread walks all rows for its columns, so every sum
/// runs in ascending (b, t) order.
template <class T>
void backward_columns(const EmbeddingBackward& call, std::int64_t first, std::int64_t width) {
  for (std::int64_t row = 0; row < call.batch * call.time; ++row) {
    const T* gradient = static_cast<const T*>(call.d_out) + row * call.width + first;
    float* token = call.token_gradient + call.tokens[row] * call.width + first;
    float* position =
        call.positions ? call.position_gradient + row % call.time * call.width + first : nullptr;
    for_vectors(width, [&](std::int64_t i, std::int64_t lanes) {
      const FloatVector value = load_at(gradient, i, lanes);
      store_at(hn::Add(load_at(token, i, lanes), value), token, i, lanes);
      if (position != nullptr) store_at(hn::Add(load_at(position, i, lanes), value), position, i, lanes);
    });
  }
}

void forward(const EmbeddingForward& call, std::int64_t row) {
  with_floating(call.dtype, [&](auto type) { forward_row<decltype(type)>(call, row); });
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

void embedding_forward(const EmbeddingForward& call) {
  const auto run = HWY_DYNAMIC_DISPATCH(forward);
  parallel_ranges(call.threads, call.batch * call.time, row_grain(call.width),
                  [&](std::int64_t first, std::int64_t count) {
                    for (std::int64_t row = first; row < first + count; ++row) run(call, row);
                  });
}

void embedding_backward(const EmbeddingBackward& call) {
  const auto run = HWY_DYNAMIC_DISPATCH(backward);
  parallel_ranges(call.threads, call.width, embedding_column_chunk,
                  [&](std::int64_t first, std::int64_t count) {
                    for (std::int64_t at = first; at < first + count; at += embedding_column_chunk) {
                      run(call, at, std::min(embedding_column_chunk, first + count - at));
                    }
                  });
}

}  // namespace tranche::kernels::cpu
#endif
