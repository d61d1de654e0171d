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

/// Adds the terms of `rows` rows in columns [first, first + width) to the sums of both gradients. The sums
/// hold whole vectors; several rows are added to one while it is in a register, one after the other.
template <int rows, class T>
void add_rows(const NormBackward& call, std::int64_t row, std::int64_t first, std::int64_t width,
              float* weight_sums, float* bias_sums) {
  const bool centred = call.mean != nullptr;
  const T* x = static_cast<const T*>(call.x) + row * call.columns + first;
  const T* dy = static_cast<const T*>(call.dy) + row * call.columns + first;
  for_vectors(width, [&](std::int64_t i, std::int64_t lanes) {
    FloatVector weight = load(weight_sums + i);
    FloatVector bias = centred ? load(bias_sums + i) : weight;
    for (int r = 0; r < rows; ++r) {
      const FloatVector mean = hn::Set(FloatTag(), centred ? call.mean[row + r] : 0.0f);
      const FloatVector rstd = hn::Set(FloatTag(), call.rstd[row + r]);
      const FloatVector h = hn::Mul(hn::Sub(load_at(x + r * call.columns, i, lanes), mean), rstd);
      const FloatVector gradient = load_at(dy + r * call.columns, i, lanes);
      weight = hn::Add(weight, hn::Mul(gradient, h));
      bias = hn::Add(bias, gradient);
    }
    store(weight, weight_sums + i);
    if (centred) store(bias, bias_sums + i);
  });
}

/// Calls body<4>(row) for fours of the rows of a block, and body<1>(row) for the rest.
template <class Body>
void for_rows_of_block(const NormBackward& call, std::int64_t block, const Body& body) {
  const std::int64_t end = std::min((block + 1) * norm_row_block, call.rows);
  std::int64_t row = block * norm_row_block;
  for (; row + 4 <= end; row += 4) body.template operator()<4>(row);
  for (; row < end; ++row) body.template operator()<1>(row);
}

/// Weight and bias gradients of columns [first, first + width), width <= norm_column_chunk.
template <class T>
void backward_columns(const NormBackward& call, std::int64_t first, std::int64_t width) {
  alignas(64) float weight_total[norm_column_chunk] = {}, bias_total[norm_column_chunk] = {};
  for (std::int64_t block = 0; block * norm_row_block < call.rows; ++block) {
    alignas(64) float weight_sums[norm_column_chunk] = {}, bias_sums[norm_column_chunk] = {};
    for_rows_of_block(call, block, [&]<int rows>(std::int64_t row) {
      add_rows<rows, T>(call, row, first, width, weight_sums, bias_sums);
    });
    for (std::int64_t i = 0; i < width; ++i) {
      weight_total[i] += weight_sums[i];
      bias_total[i] += bias_sums[i];
    }
  }
  for (std::int64_t i = 0; i < width; ++i) {
    call.weight_gradient[first + i] += weight_total[i];
    if (call.bias_gradient != nullptr) call.bias_gradient[first + i] += bias_total[i];
  }
}

/// dx of a block's rows, and its sums of all columns: rows are read from memory once.
template <class T>
void backward_block(const NormBackward& call, std::int64_t block, float* sums) {
  const std::int64_t width = norm_sums_width(call.columns);
  std::fill_n(sums, (call.mean != nullptr ? 2 : 1) * width, 0.0f);
  for_rows_of_block(call, block, [&]<int rows>(std::int64_t row) {
    add_rows<rows, T>(call, row, 0, call.columns, sums, sums + width);
    for (int r = 0; r < rows; ++r) backward_row<T>(call, row + r);
  });
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

void whole_block(const NormBackward& call, std::int64_t block, float* sums) {
  with_floating(call.dtype, [&](auto type) { backward_block<decltype(type)>(call, block, sums); });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(forward);
HWY_EXPORT(backward);
HWY_EXPORT(parameter_gradients);
HWY_EXPORT(whole_block);

void norm_forward(const NormForward& call) {
  if (call.columns == 0) return;
  const auto run = HWY_DYNAMIC_DISPATCH(forward);
  parallel_ranges(call.threads, call.rows, row_grain(call.columns),
                  [&](std::int64_t first, std::int64_t count) {
                    for (std::int64_t row = first; row < first + count; ++row) run(call, row);
                  });
}

namespace {

/// Threads share the columns of the parameters' gradients, and then the rows of dx: x and dy are read twice.
void backward_in_two_passes(const NormBackward& call) {
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

}  // namespace

void norm_backward(const NormBackward& call) {
  if (call.columns == 0) return;
  const std::int64_t width = norm_sums_width(call.columns), both = (call.mean != nullptr ? 2 : 1) * width;
  const std::int64_t blocks = divide_round_up(call.rows, norm_row_block);
  // The workspace holds the totals, and behind them the sums of as many blocks as fit. Either way the same
  // numbers are added in the same order.
  const std::int64_t fitting = call.workspace.bytes / (both * static_cast<std::int64_t>(sizeof(float))) - 1;
  if (blocks < 2 * call.threads || fitting < call.threads) return backward_in_two_passes(call);
  auto* totals = static_cast<float*>(call.workspace.data);
  float* sums = totals + both;
  std::fill_n(totals, both, 0.0f);
  const auto run = HWY_DYNAMIC_DISPATCH(whole_block);
  for (std::int64_t begin = 0; begin < blocks; begin += fitting) {
    const std::int64_t held = std::min(fitting, blocks - begin);
    parallel_ranges(call.threads, held, 1, [&](std::int64_t first, std::int64_t count) {
      for (std::int64_t i = first; i < first + count; ++i) run(call, begin + i, sums + i * both);
    });
    parallel_ranges(call.threads, both, column_grain(call.threads, both, parallel_grain / held),
                    [&](std::int64_t first, std::int64_t count) {
                      for (std::int64_t block = 0; block < held; ++block) {
                        const float* from = sums + block * both;
                        for (std::int64_t i = first; i < first + count; ++i) totals[i] += from[i];
                      }
                    });
  }
  for (std::int64_t i = 0; i < call.columns; ++i) {
    call.weight_gradient[i] += totals[i];
    if (call.bias_gradient != nullptr) call.bias_gradient[i] += totals[width + i];
  }
}

}  // namespace tranche::kernels::cpu
#endif
