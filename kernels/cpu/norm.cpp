#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/norm.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "hwy/cache_control.h"
#include "kernels/cpu/norm.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row-inl.h"
#include "tranche/core/shape.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// The loops of RMS norm take pairs of vectors (vector-inl.h), each half with sums of its own; those of layer
/// norm, whose sums run in one order from the first element to the last, single vectors.
template <bool centred, class Body>
HWY_INLINE void for_row(std::int64_t count, const Body& body) {
  const std::int64_t step = centred ? count + 1 : 2 * lane_count();
  std::int64_t i = 0;
  for (; i + step <= count; i += step) {
    body(RowHalf<0>{{i}});
    body(RowHalf<1>{{i}});
  }
  for_vectors(count - i, [&](std::int64_t offset, std::int64_t lanes) {
    body(RowVector{i + offset, lanes});
  });
}

/// The same for a body that returns what is stored to `to`; whole pairs by non-temporal stores if
/// `streaming`.
template <bool centred, class T, class Body>
HWY_INLINE void store_row(std::int64_t count, T* to, bool streaming, const Body& body) {
  const std::int64_t step = centred ? count + 1 : 2 * lane_count();
  std::int64_t i = 0;
  for (; i + step <= count; i += step) {
    const FloatVector first = body(RowHalf<0>{{i}}), second = body(RowHalf<1>{{i}});
    store_halves(FloatTag(), first, second, to + i, streaming);
  }
  for_vectors(count - i, [&](std::int64_t offset, std::int64_t lanes) {
    store_at(body(RowVector{i + offset, lanes}), to, i + offset, lanes);
  });
}

/// Sums of a row's halves.
struct RowSum {
  FloatVector part[2];
  HWY_INLINE RowSum() : part{hn::Zero(FloatTag()), hn::Zero(FloatTag())} {}
  template <class At>
  HWY_INLINE void add(const At& at, FloatVector value) {
    part[at.part] = hn::Add(part[at.part], value);
  }
  template <bool centred>
  HWY_INLINE float total() const {
    return sum_of(centred ? part[0] : hn::Add(part[0], part[1]));
  }
};

template <class T, bool centred>
void forward_row(const NormForward& call, std::int64_t row, T* row_sum) {
  const FloatTag d;
  const std::int64_t start = row * call.columns;
  const T* x = static_cast<const T*>(call.x) + start;
  const T* addend = static_cast<const T*>(call.addend) + start;
  const T* weight = static_cast<const T*>(call.weight);
  const T* bias = static_cast<const T*>(call.bias);
  T* y = static_cast<T*>(call.y) + start;
  const auto count = static_cast<float>(call.columns);
  // The next row comes from memory while this one is written.
  const std::int64_t ahead = row + 1 < call.rows ? call.columns : 0;
  const T* next = x + ahead;
  const T* next_addend = call.sum != nullptr ? addend + ahead : nullptr;

  if (call.sum != nullptr) {
    T* sum = call.streaming ? row_sum : static_cast<T*>(call.sum) + start;
    store_row<centred>(call.columns, sum, false, [&](auto at) { return hn::Add(at(x), at(addend)); });
    x = sum;
  }
  // RMS norm is the norm around 0.
  float mean = 0;
  if (centred) {
    RowSum sum;
    for_row<centred>(call.columns, [&](auto at) { sum.add(at, at(x)); });
    mean = sum.total<centred>() / count;
    call.mean[row] = mean;
  }
  const FloatVector mean_vector = hn::Set(d, mean);
  const auto less_mean = [&](FloatVector value) { return centred ? hn::Sub(value, mean_vector) : value; };
  RowSum squares;
  for_row<centred>(call.columns, [&](auto at) {
    const FloatVector value = at.keep(less_mean(at(x)));
    squares.add(at, hn::Mul(value, value));
  });
  const float rstd = 1.0f / std::sqrt(squares.total<centred>() / count + call.epsilon);
  const FloatVector rstd_vector = hn::Set(d, rstd);
  store_row<centred>(call.columns, y, call.streaming, [&](auto at) {
    at.fetch(next);
    if (next_addend != nullptr) at.fetch(next_addend);
    FloatVector scaled = hn::Mul(hn::Mul(less_mean(at(x)), rstd_vector), at(weight));
    if (centred) scaled = hn::Add(scaled, at(bias));
    return scaled;
  });
  if (call.sum != nullptr && call.streaming) {
    store_row<centred>(call.columns, static_cast<T*>(call.sum) + start, true,
                       [&](auto at) { return at(row_sum); });
  }
  call.rstd[row] = rstd;
}

/// The two means that dx of a row needs besides its elements.
struct RowMeans {
  float g = 0, gh = 0;
};

/// One pass over `rows` rows of columns [first, first + width). For the parameters, unless `weight_sums` is
/// null, the rows' terms are added to the sums of both gradients, which hold whole vectors in the order of
/// place_of(); several rows are added to one while it is in a register, one after the other. For dx, unless
/// `means` is null: with h = (x - mean) rstd and g = dy weight, the means of g and g h of each row.
template <int rows, bool for_parameters, bool for_rows, class T, bool centred>
void add_rows(const NormBackward& call, std::int64_t row, std::int64_t first, std::int64_t width,
              float* weight_sums, float* bias_sums, RowMeans* means) {
  const T* x = static_cast<const T*>(call.x) + row * call.columns + first;
  const T* dy = static_cast<const T*>(call.dy) + row * call.columns + first;
  const T* weight = static_cast<const T*>(call.weight) + first;
  RowSum sum_g[rows], sum_gh[rows];
  for_row<centred>(width, [&](auto at) {
    FloatVector weight_sum = hn::Zero(FloatTag()), bias_sum = weight_sum, factor = weight_sum;
    if (for_parameters) weight_sum = load(weight_sums + at.place());
    if (for_parameters && centred) bias_sum = load(bias_sums + at.place());
    if (for_rows) factor = at(weight);
    for (int r = 0; r < rows; ++r) {
      FloatVector h = at(x + r * call.columns);
      if (centred) h = hn::Sub(h, hn::Set(FloatTag(), call.mean[row + r]));
      h = hn::Mul(h, hn::Set(FloatTag(), call.rstd[row + r]));
      const FloatVector gradient = at(dy + r * call.columns);
      if (for_parameters) weight_sum = hn::Add(weight_sum, hn::Mul(gradient, h));
      if (for_parameters && centred) bias_sum = hn::Add(bias_sum, gradient);
      if (!for_rows) continue;
      const FloatVector g = hn::Mul(gradient, factor);
      if (centred) sum_g[r].add(at, g);
      sum_gh[r].add(at, at.keep(hn::Mul(g, h)));
    }
    if (for_parameters) store(weight_sum, weight_sums + at.place());
    if (for_parameters && centred) store(bias_sum, bias_sums + at.place());
  });
  const auto count = static_cast<float>(call.columns);
  for (int r = 0; for_rows && r < rows; ++r) {
    if (centred) means[r].g = sum_g[r].template total<centred>() / count;
    means[r].gh = sum_gh[r].template total<centred>() / count;
  }
}

/// The index of a column of `width` in the sums of add_rows().
template <class T, bool centred>
std::int64_t place_of(std::int64_t column, std::int64_t width) {
  const std::int64_t lanes = lane_count(), step = 2 * lanes, in = column % step;
  const bool halves = !centred && sizeof(T) == 2 && column < width / step * step;
  return halves ? column - in + in / 2 + in % 2 * lanes : column;
}

/// dx = rstd (g - mean(g) - h mean(g h)), where RMS norm is without mean(g).
template <class T, bool centred>
void dx_row(const NormBackward& call, std::int64_t row, const RowMeans& means, std::int64_t rows_ahead) {
  const FloatTag d;
  const T* x = static_cast<const T*>(call.x) + row * call.columns;
  const T* dy = static_cast<const T*>(call.dy) + row * call.columns;
  const T* weight = static_cast<const T*>(call.weight);
  T* dx = static_cast<T*>(call.dx) + row * call.columns;
  // Rows that are read next come from memory while this one is written.
  const std::int64_t ahead = row + rows_ahead < call.rows ? rows_ahead * call.columns : 0;
  const FloatVector mean = hn::Set(d, centred ? call.mean[row] : 0.0f);
  const FloatVector rstd = hn::Set(d, call.rstd[row]);
  const FloatVector mean_g = hn::Set(d, means.g), mean_gh = hn::Set(d, means.gh);
  store_row<centred>(call.columns, dx, false, [&](auto at) {
    at.fetch(x + ahead);
    at.fetch(dy + ahead);
    const FloatVector h = hn::Mul(centred ? hn::Sub(at(x), mean) : at(x), rstd);
    FloatVector g = hn::Mul(at(dy), at(weight));
    if (centred) g = hn::Sub(g, mean_g);
    const FloatVector gradient = hn::Mul(rstd, hn::Sub(g, hn::Mul(h, mean_gh)));
    return call.accumulate_dx ? hn::Add(at(dx), gradient) : gradient;
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
template <class T, bool centred>
void backward_columns(const NormBackward& call, std::int64_t first, std::int64_t width) {
  alignas(64) float weight_total[norm_column_chunk] = {}, bias_total[norm_column_chunk] = {};
  for (std::int64_t block = 0; block * norm_row_block < call.rows; ++block) {
    alignas(64) float weight_sums[norm_column_chunk] = {}, bias_sums[norm_column_chunk] = {};
    for_rows_of_block(call, block, [&]<int rows>(std::int64_t row) {
      add_rows<rows, true, false, T, centred>(call, row, first, width, weight_sums, bias_sums, nullptr);
    });
    for (std::int64_t i = 0; i < width; ++i) {
      weight_total[i] += weight_sums[i];
      bias_total[i] += bias_sums[i];
    }
  }
  for (std::int64_t i = 0; i < width; ++i) {
    const std::int64_t place = place_of<T, centred>(i, width);
    call.weight_gradient[first + i] += weight_total[place];
    if (call.bias_gradient != nullptr) call.bias_gradient[first + i] += bias_total[place];
  }
}

/// dx of a block's rows, and its sums of all columns: rows are read from memory once.
template <class T, bool centred>
void backward_block(const NormBackward& call, std::int64_t block, float* sums) {
  const std::int64_t width = norm_sums_width(call.columns);
  std::fill_n(sums, (centred ? 2 : 1) * width, 0.0f);
  for_rows_of_block(call, block, [&]<int rows>(std::int64_t row) {
    RowMeans means[rows];
    add_rows<rows, true, true, T, centred>(call, row, 0, call.columns, sums, sums + width, means);
    for (int r = 0; r < rows; ++r) dx_row<T, centred>(call, row + r, means[r], rows);
  });
}

/// Calls f with a value of the dtype's storage type, and whether the norm is around a mean.
template <class F>
void with_kind(DataType dtype, const float* mean, const F& f) {
  with_floating(dtype,
                [&](auto type) { mean != nullptr ? f(type, std::true_type()) : f(type, std::false_type()); });
}

void forward(const NormForward& call, std::int64_t first, std::int64_t count) {
  with_kind(call.dtype, call.mean, [&](auto type, auto centred) {
    alignas(64) decltype(type) row_sum[norm_streamed_columns];
    for (std::int64_t row = first; row < first + count; ++row) {
      forward_row<decltype(type), centred.value>(call, row, row_sum);
    }
  });
}

void backward(const NormBackward& call, std::int64_t first, std::int64_t count) {
  with_kind(call.dtype, call.mean, [&](auto type, auto centred) {
    using T = decltype(type);
    for (std::int64_t row = first; row < first + count; ++row) {
      RowMeans means;
      add_rows<1, false, true, T, centred.value>(call, row, 0, call.columns, nullptr, nullptr, &means);
      dx_row<T, centred.value>(call, row, means, 1);
    }
  });
}

void parameter_gradients(const NormBackward& call, std::int64_t first, std::int64_t width) {
  with_kind(call.dtype, call.mean, [&](auto type, auto centred) {
    backward_columns<decltype(type), centred.value>(call, first, width);
  });
}

void whole_block(const NormBackward& call, std::int64_t block, float* sums) {
  with_kind(call.dtype, call.mean, [&](auto type, auto centred) {
    backward_block<decltype(type), centred.value>(call, block, sums);
  });
}

/// Adds totals of all columns, as whole_block() has them, to the parameters' gradients.
void add_totals(const NormBackward& call, const float* totals) {
  with_kind(call.dtype, call.mean, [&](auto type, auto centred) {
    const std::int64_t width = norm_sums_width(call.columns);
    for (std::int64_t i = 0; i < call.columns; ++i) {
      const std::int64_t place = place_of<decltype(type), centred.value>(i, call.columns);
      call.weight_gradient[i] += totals[place];
      if (call.bias_gradient != nullptr) call.bias_gradient[i] += totals[width + place];
    }
  });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(forward);
HWY_EXPORT(backward);
HWY_EXPORT(parameter_gradients);
HWY_EXPORT(whole_block);
HWY_EXPORT(add_totals);

void norm_forward(const NormForward& given) {
  if (given.columns == 0) return;
  NormForward call = given;
  const std::int64_t row_bytes = call.columns * size_of(call.dtype), bytes = call.rows * row_bytes;
  const auto is_apart = [&](const void* to) { return is_streamed(to, bytes, {call.x, call.addend}); };
  call.streaming = call.mean == nullptr && row_bytes % 64 == 0 && is_apart(call.y) &&
                   (call.sum == nullptr || (is_apart(call.sum) && call.columns <= norm_streamed_columns));
  const auto run = HWY_DYNAMIC_DISPATCH(forward);
  parallel_ranges(call.threads, call.rows, row_grain(call.columns),
                  [&](std::int64_t first, std::int64_t count) {
                    run(call, first, count);
                    if (call.streaming) hwy::FlushStream();
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
                  [&](std::int64_t first, std::int64_t count) { run(call, first, count); });
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
  HWY_DYNAMIC_DISPATCH(add_totals)(call, totals);
}

}  // namespace tranche::kernels::cpu
#endif
