#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/norm.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/norm.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row-inl.h"
#include "tranche/core/shape.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

template <class T>
void forward_row(const NormForward& call, std::int64_t row) {
  const FloatTag d;
  const std::int64_t start = row * call.columns;
  const T* x = static_cast<const T*>(call.x) + start;
  const T* weight = static_cast<const T*>(call.weight);
  const T* bias = static_cast<const T*>(call.bias);
  T* y = static_cast<T*>(call.y) + start;
  const auto count = static_cast<float>(call.columns);

  if (call.sum != nullptr) {
    const T* addend = static_cast<const T*>(call.addend) + start;
    T* sum = static_cast<T*>(call.sum) + start;
    for_vectors(call.columns, [&](std::int64_t i, std::int64_t lanes) {
      store_at(hn::Add(load_at(x, i, lanes), load_at(addend, i, lanes)), sum, i, lanes);
    });
    x = sum;
  }
  // RMS norm is the norm around 0, and x - 0 is x.
  float mean = 0;
  if (call.mean != nullptr) {
    FloatVector sum = hn::Zero(d);
    for_vectors(call.columns,
                [&](std::int64_t i, std::int64_t lanes) { sum = hn::Add(sum, load_at(x, i, lanes)); });
    mean = sum_of(sum) / count;
    call.mean[row] = mean;
  }
  const FloatVector mean_vector = hn::Set(d, mean);
  FloatVector squares = hn::Zero(d);
  for_vectors(call.columns, [&](std::int64_t i, std::int64_t lanes) {
    const FloatVector centred = keep_first(hn::Sub(load_at(x, i, lanes), mean_vector), lanes, hn::Zero(d));
    squares = hn::Add(squares, hn::Mul(centred, centred));
  });
  const float rstd = 1.0f / std::sqrt(sum_of(squares) / count + call.epsilon);
  const FloatVector rstd_vector = hn::Set(d, rstd);
  for_vectors(call.columns, [&](std::int64_t i, std::int64_t lanes) {
    const FloatVector normal = hn::Mul(hn::Sub(load_at(x, i, lanes), mean_vector), rstd_vector);
    FloatVector scaled = hn::Mul(normal, load_at(weight, i, lanes));
    if (bias != nullptr) scaled = hn::Add(scaled, load_at(bias, i, lanes));
    store_at(scaled, y, i, lanes);
  });
  call.rstd[row] = rstd;
}

/// dx of one row. With h = (x - mean) rstd and g = dy weight: dx = rstd (g - mean(g) - h mean(g h)), where
/// RMS norm is without mean(g).
template <class T>
void backward_row(const NormBackward& call, std::int64_t row) {
  const FloatTag d;
  const T* x = static_cast<const T*>(call.x) + row * call.columns;
  const T* dy = static_cast<const T*>(call.dy) + row * call.columns;
  const T* weight = static_cast<const T*>(call.weight);
  T* dx = static_cast<T*>(call.dx) + row * call.columns;
  const auto count = static_cast<float>(call.columns);
  const bool centred = call.mean != nullptr;
  const FloatVector mean = hn::Set(d, centred ? call.mean[row] : 0.0f);
  const FloatVector rstd = hn::Set(d, call.rstd[row]);

  FloatVector sum_g = hn::Zero(d), sum_gh = hn::Zero(d);
  for_vectors(call.columns, [&](std::int64_t i, std::int64_t lanes) {
    const FloatVector h = hn::Mul(hn::Sub(load_at(x, i, lanes), mean), rstd);
    const FloatVector g = hn::Mul(load_at(dy, i, lanes), load_at(weight, i, lanes));
    sum_g = hn::Add(sum_g, g);
    sum_gh = hn::Add(sum_gh, keep_first(hn::Mul(g, h), lanes, hn::Zero(d)));
  });
  const FloatVector mean_g = hn::Set(d, centred ? sum_of(sum_g) / count : 0.0f);
  const FloatVector mean_gh = hn::Set(d, sum_of(sum_gh) / count);
  for_vectors(call.columns, [&](std::int64_t i, std::int64_t lanes) {
    const FloatVector h = hn::Mul(hn::Sub(load_at(x, i, lanes), mean), rstd);
    const FloatVector g = hn::Mul(load_at(dy, i, lanes), load_at(weight, i, lanes));
    FloatVector gradient = hn::Mul(rstd, hn::Sub(hn::Sub(g, mean_g), hn::Mul(h, mean_gh)));
    if (call.accumulate_dx) gradient = hn::Add(load_at(dx, i, lanes), gradient);
    store_at(gradient, dx, i, lanes);
  });
}

/// Weight and bias gradients of columns [first, first + width), width <= norm_column_chunk.
template <class T>
void backward_columns(const NormBackward& call, std::int64_t first, std::int64_t width) {
  const bool centred = call.mean != nullptr;
  alignas(64) float weight_total[norm_column_chunk] = {}, bias_total[norm_column_chunk] = {};
  for (std::int64_t block = 0; block < call.rows; block += norm_row_block) {
    alignas(64) float weight_sum[norm_column_chunk] = {}, bias_sum[norm_column_chunk] = {};
    const std::int64_t end = std::min(block + norm_row_block, call.rows);
    // The sums hold whole vectors: their length is a multiple of every vector width. Several rows are added
    // to a sum while it is in a register, one after the other.
    const auto add_rows = [&]<int rows>(std::int64_t row) {
      const T* x = static_cast<const T*>(call.x) + row * call.columns + first;
      const T* dy = static_cast<const T*>(call.dy) + row * call.columns + first;
      for_vectors(width, [&](std::int64_t i, std::int64_t lanes) {
        FloatVector weight = load(weight_sum + i), bias = load(bias_sum + i);
        for (int r = 0; r < rows; ++r) {
          const FloatVector mean = hn::Set(FloatTag(), centred ? call.mean[row + r] : 0.0f);
          const FloatVector rstd = hn::Set(FloatTag(), call.rstd[row + r]);
          const FloatVector h = hn::Mul(hn::Sub(load_at(x + r * call.columns, i, lanes), mean), rstd);
          const FloatVector gradient = load_at(dy + r * call.columns, i, lanes);
          weight = hn::Add(weight, hn::Mul(gradient, h));
          bias = hn::Add(bias, gradient);
        }
        store(weight, weight_sum + i);
        store(bias, bias_sum + i);
      });
    };
    std::int64_t row = block;
    for (; row + 4 <= end; row += 4) add_rows.template operator()<4>(row);
    for (; row < end; ++row) add_rows.template operator()<1>(row);
    for (std::int64_t i = 0; i < width; ++i) {
      weight_total[i] += weight_sum[i];
      bias_total[i] += bias_sum[i];
    }
  }
  for (std::int64_t i = 0; i < width; ++i) {
    call.weight_gradient[first + i] += weight_total[i];
    if (call.bias_gradient != nullptr) call.bias_gradient[first + i] += bias_total[i];
  }
}

void forward(const NormForward& call, std::int64_t row) {
  with_floating(call.dtype, [&](auto type) { forward_row<decltype(type)>(call, row); });
}

void backward(const NormBackward& call, std::int64_t row) {
  with_floating(call.dtype, [&](auto type) { backward_row<decltype(type)>(call, row); });
}

void parameter_gradients(const NormBackward& call, std::int64_t first, std::int64_t width) {
  with_floating(call.dtype, [&](auto type) { backward_columns<decltype(type)>(call, first, width); });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(forward);
HWY_EXPORT(backward);
HWY_EXPORT(parameter_gradients);

void norm_forward(const NormForward& call) {
  if (call.columns == 0) return;
  const auto run = HWY_DYNAMIC_DISPATCH(forward);
  parallel_ranges(call.threads, call.rows, row_grain(call.columns),
                  [&](std::int64_t first, std::int64_t count) {
                    for (std::int64_t row = first; row < first + count; ++row) run(call, row);
                  });
}

void norm_backward(const NormBackward& call) {
  if (call.columns == 0) return;
  const auto sums = HWY_DYNAMIC_DISPATCH(parameter_gradients);
  parallel_ranges(call.threads, call.columns, column_grain(call.threads, call.columns, 0),
                  [&](std::int64_t first, std::int64_t count) {
                    for (std::int64_t at = first; at < first + count; at += norm_column_chunk) {
                      sums(call, at, std::min(norm_column_chunk, first + count - at));
                    }
                  });
  const auto run = HWY_DYNAMIC_DISPATCH(backward);
  parallel_ranges(call.threads, call.rows, row_grain(call.columns),
                  [&](std::int64_t first, std::int64_t count) {
                    for (std::int64_t row = first; row < first + count; ++row) run(call, row);
                  });
}

}  // namespace tranche::kernels::cpu
#endif
