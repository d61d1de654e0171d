#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/norm.cpp"
#include <hwy/foreach_target.h>
// Must follow foreach_target.h.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>

#include "hwy/cache_control.h"
#include "kernels/cpu/norm.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row-inl.h"
#include "tranche/core/shape.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// The loops of RMS norm process pairs of vectors (vector-inl.h), each half with separate sums. The sums of
/// layer norm run in one order from the first element to the last, so its loops process single vectors.
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

/// The same for a body whose results are stored to `to`, with non-temporal stores for whole pairs if
/// `streaming`. `of_bf16` as for rounded_to_upper().
template <bool centred, bool of_bf16 = false, class T, class Body>
HWY_INLINE void store_row(std::int64_t count, T* to, bool streaming, const Body& body) {
  const std::int64_t step = centred ? count + 1 : 2 * lane_count();
  std::int64_t i = 0;
  for (; i + step <= count; i += step) {
    const FloatVector first = body(RowHalf<0>{{i}}), second = body(RowHalf<1>{{i}});
    store_halves<of_bf16>(FloatTag(), first, second, to + i, streaming);
  }
  for_vectors(count - i, [&](std::int64_t offset, std::int64_t lanes) {
    store_at(body(RowVector{i + offset, lanes}), to, i + offset, lanes);
  });
}

/// The sums of a row's halves.
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

/// Measures a row of x, or of its sum with the addend, which is written to `sum`: stores its mean, and the
/// sum of squares in place of 1 / deviation.
template <class T, bool centred>
void measure_row(const NormForward& call, std::int64_t row, T* sum) {
  const std::int64_t start = row * call.columns;
  const T* x = static_cast<const T*>(call.x) + start;
  const T* addend = static_cast<const T*>(call.addend) + start;
  const auto count = static_cast<float>(call.columns);
  if (sum != nullptr) {
    store_row<centred, true>(call.columns, sum, false, [&](auto at) { return hn::Add(at(x), at(addend)); });
    x = sum;
  }
  // RMS norm uses a mean of 0.
  float mean = 0;
  if (centred) {
    RowSum total;
    for_row<centred>(call.columns, [&](auto at) { total.add(at, at(x)); });
    mean = total.total<centred>() / count;
    call.mean[row] = mean;
  }
  const FloatVector mean_vector = hn::Set(FloatTag(), mean);
  RowSum squares;
  for_row<centred>(call.columns, [&](auto at) {
    const FloatVector value = at.keep(centred ? hn::Sub(at(x), mean_vector) : at(x));
    squares.add(at, hn::Mul(value, value));
  });
  call.rstd[row] = squares.total<centred>();
}

/// Computes 1 / deviation of `count` measured rows, in vectors over rows, so that no row waits for its root
/// and quotients.
inline void finish_rows(const NormForward& call, std::int64_t row, std::int64_t count) {
  float* rstd = call.rstd + row;
  const auto columns = static_cast<float>(call.columns);
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    const auto variance = hn::Div(load(d, rstd + i), hn::Set(d, columns));
    const auto deviation = hn::Sqrt(hn::Add(variance, hn::Set(d, call.epsilon)));
    store(d, hn::Div(hn::Set(d, 1.0f), deviation), rstd + i);
  });
}

/// Computes y of a row whose mean and 1 / deviation are known; `x` is the row, or its sum with the addend.
template <class T, bool centred>
void scale_row(const NormForward& call, std::int64_t row, const T* x, std::int64_t rows_ahead) {
  const std::int64_t start = row * call.columns;
  const T* weight = static_cast<const T*>(call.weight);
  const T* bias = static_cast<const T*>(call.bias);
  // The next rows are prefetched while this one is written.
  const std::int64_t next = start + (row + rows_ahead < call.rows ? rows_ahead * call.columns : 0);
  const T* next_x = static_cast<const T*>(call.x) + next;
  const T* next_addend = call.sum != nullptr ? static_cast<const T*>(call.addend) + next : nullptr;
  const FloatVector mean = hn::Set(FloatTag(), centred ? call.mean[row] : 0.0f);
  const FloatVector rstd = hn::Set(FloatTag(), call.rstd[row]);
  store_row<centred, true>(call.columns, static_cast<T*>(call.y) + start, call.streaming, [&](auto at) {
    at.fetch(next_x);
    if (next_addend != nullptr) at.fetch(next_addend);
    const FloatVector value = centred ? hn::Sub(at(x), mean) : at(x);
    const FloatVector scaled = hn::Mul(hn::Mul(value, rstd), at(weight));
    return centred ? hn::Add(scaled, at(bias)) : scaled;
  });
}

/// Computes rows [row, row + count), of at most norm_streamed_columns elements if results are streamed. All
/// are measured before the first is written, so that narrow rows do not wait for their roots and quotients.
template <class T, bool centred>
void forward_rows(const NormForward& call, std::int64_t row, std::int64_t count, T* streamed_sums) {
  const auto place = [&](void* base, std::int64_t r) { return static_cast<T*>(base) + r * call.columns; };
  const auto sum_of_row = [&](std::int64_t r) -> T* {
    if (call.sum == nullptr) return nullptr;
    return call.streaming ? place(streamed_sums, r - row) : place(call.sum, r);
  };
  for (std::int64_t r = row; r < row + count; ++r) measure_row<T, centred>(call, r, sum_of_row(r));
  finish_rows(call, row, count);
  for (std::int64_t r = row; r < row + count; ++r) {
    const T* sum = sum_of_row(r);
    scale_row<T, centred>(call, r, sum != nullptr ? sum : static_cast<const T*>(call.x) + r * call.columns,
                          count);
    if (sum == nullptr || !call.streaming) continue;
    store_row<centred, true>(call.columns, place(call.sum, r), true, [&](auto at) { return at(sum); });
  }
}

/// The terms of a row's gradients, from column `first` on: dy and h = (x - mean) rstd.
template <class T, bool centred>
struct GradientRow {
  const T *x, *dy;
  FloatVector mean, rstd;
  GradientRow(const NormBackward& call, std::int64_t row, std::int64_t first)
      : x(static_cast<const T*>(call.x) + row * call.columns + first),
        dy(static_cast<const T*>(call.dy) + row * call.columns + first),
        mean(hn::Set(FloatTag(), centred ? call.mean[row] : 0.0f)),
        // rounded_to_upper() supports only some of the NaNs that a caller may pass.
        rstd(hn::Set(FloatTag(), std::isnan(call.rstd[row]) ? NAN : call.rstd[row])) {}
  template <class At>
  HWY_INLINE FloatVector h(const At& at) const {
    return hn::Mul(centred ? hn::Sub(at(x), mean) : at(x), rstd);
  }
};

/// Adds the terms of `rows` rows at columns [first, first + width) to the sums of the parameters' gradients,
/// which hold whole vectors in the order of place_of(). The rows are added one after the other while a sum is
/// in a register.
template <int rows, class T, bool centred>
void add_rows(const NormBackward& call, std::int64_t row, std::int64_t first, std::int64_t width,
              float* weight_sums, float* bias_sums) {
  for_row<centred>(width, [&](auto at) {
    FloatVector weight_sum = load(weight_sums + at.place()), bias_sum = load(bias_sums + at.place());
    for (int r = 0; r < rows; ++r) {
      const GradientRow<T, centred> terms(call, row + r, first);
      const FloatVector gradient = at(terms.dy);
      weight_sum = hn::Add(weight_sum, hn::Mul(gradient, terms.h(at)));
      if (centred) bias_sum = hn::Add(bias_sum, gradient);
    }
    store(weight_sum, weight_sums + at.place());
    if (centred) store(bias_sum, bias_sums + at.place());
  });
}

/// The index of a column of `width` in the sums of add_rows().
template <class T, bool centred>
std::int64_t place_of(std::int64_t column, std::int64_t width) {
  const std::int64_t lanes = lane_count(), step = 2 * lanes, in = column % step;
  const bool halves = !centred && sizeof(T) == 2 && column < width / step * step;
  return halves ? column - in + in / 2 + in % 2 * lanes : column;
}

/// Calls body<4>(row) for groups of four rows in a block, and body<1>(row) for the rest.
template <class Body>
void for_rows_of_block(const NormBackward& call, std::int64_t block, const Body& body) {
  const std::int64_t end = std::min((block + 1) * norm_row_block, call.rows);
  std::int64_t row = block * norm_row_block;
  for (; row + 4 <= end; row += 4) body.template operator()<4>(row);
  for (; row < end; ++row) body.template operator()<1>(row);
}

/// Computes weight and bias gradients of columns [first, first + width), width <= norm_column_chunk.
template <class T, bool centred>
void backward_columns(const NormBackward& call, std::int64_t first, std::int64_t width) {
  alignas(64) float weight_total[norm_column_chunk] = {}, bias_total[norm_column_chunk] = {};
  for (std::int64_t block = 0; block * norm_row_block < call.rows; ++block) {
    alignas(64) float weight_sums[norm_column_chunk] = {}, bias_sums[norm_column_chunk] = {};
    for_rows_of_block(call, block, [&]<int rows>(std::int64_t row) {
      add_rows<rows, T, centred>(call, row, first, width, weight_sums, bias_sums);
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

/// The two means that dx of a row needs beside its elements: those of g = dy weight and of g h.
struct RowMeans {
  float g = 0, gh = 0;
};

/// One pass that writes dx of a row, whose means are given, and measures the next row, which gives its means
/// and, with `for_parameters`, its terms of the sums of add_rows(); either part may be left out. Together,
/// the arithmetic of one overlaps the memory accesses of the other. dx = rstd (g - mean(g) - h mean(g h)),
/// without mean(g) for RMS norm.
template <bool written, bool measured, bool for_parameters, class T, bool centred>
void pass_row(const NormBackward& call, std::int64_t row, RowMeans& means, float* sums) {
  const T* weight = static_cast<const T*>(call.weight);
  T* dx = static_cast<T*>(call.dx) + row * call.columns;
  const GradientRow<T, centred> now(call, row, 0), next(call, row + (written && measured ? 1 : 0), 0);
  const FloatVector mean_g = hn::Set(FloatTag(), means.g), mean_gh = hn::Set(FloatTag(), means.gh);
  RowSum sum_g, sum_gh;
  const auto at_place = [&](auto at) {
    const FloatVector factor = at(weight);
    if (measured) {
      const FloatVector h = next.h(at), gradient = at(next.dy), g = hn::Mul(gradient, factor);
      const auto add_to = [&](float* to, FloatVector term) {
        store(hn::Add(load(to + at.place()), term), to + at.place());
      };
      if (for_parameters) add_to(sums, hn::Mul(gradient, h));
      if (for_parameters && centred) add_to(sums + norm_sums_width(call.columns), gradient);
      if (centred) sum_g.add(at, g);
      sum_gh.add(at, at.keep(hn::Mul(g, h)));
    }
    FloatVector g = hn::Mul(at(now.dy), factor);
    if (centred) g = hn::Sub(g, mean_g);
    const FloatVector gradient = hn::Mul(now.rstd, hn::Sub(g, hn::Mul(now.h(at), mean_gh)));
    return call.accumulate_dx && written ? hn::Add(at(dx), gradient) : gradient;
  };
  if (written) {
    store_row<centred, true>(call.columns, dx, false, at_place);
  } else {
    for_row<centred>(call.columns, [&](auto at) { at_place(at); });
  }
  const auto count = static_cast<float>(call.columns);
  if (measured && centred) means.g = sum_g.template total<centred>() / count;
  if (measured) means.gh = sum_gh.template total<centred>() / count;
}

/// Computes dx of rows [first, first + count), reading memory once, and with `for_parameters` the rows' sums
/// for all columns.
template <bool for_parameters, class T, bool centred>
void backward_rows(const NormBackward& call, std::int64_t first, std::int64_t count, float* sums) {
  RowMeans means;
  pass_row<false, true, for_parameters, T, centred>(call, first, means, sums);
  const std::int64_t last = first + count - 1;
  for (std::int64_t row = first; row < last; ++row) {
    pass_row<true, true, for_parameters, T, centred>(call, row, means, sums);
  }
  pass_row<true, false, for_parameters, T, centred>(call, last, means, sums);
}

/// Calls f with a value of the dtype's storage type, and whether the norm is centred on a mean.
template <class F>
void with_kind(DataType dtype, const float* mean, const F& f) {
  with_floating(dtype,
                [&](auto type) { mean != nullptr ? f(type, std::true_type()) : f(type, std::false_type()); });
}

void forward(const NormForward& call, std::int64_t first, std::int64_t count) {
  with_kind(call.dtype, call.mean, [&](auto type, auto centred) {
    // This is not an array of 16-bit numbers, because that would be zeroed each time.
    alignas(64) std::byte sums[norm_streamed_columns * sizeof(type)];
    // Processing fp32 rows with a residual in groups took a third longer, because memory bounds them.
    const std::int64_t row_bytes = call.columns * static_cast<std::int64_t>(sizeof(type));
    const bool grouped = sizeof(type) == 2 || call.sum == nullptr;
    const std::int64_t end = first + count, step = grouped ? std::max<std::int64_t>(1, 4096 / row_bytes) : 1;
    for (std::int64_t row = first; row < end; row += step) {
      forward_rows<decltype(type), centred.value>(call, row, std::min(step, end - row),
                                                  reinterpret_cast<decltype(type)*>(sums));
    }
  });
}

void backward(const NormBackward& call, std::int64_t first, std::int64_t count) {
  with_kind(call.dtype, call.mean, [&](auto type, auto centred) {
    backward_rows<false, decltype(type), centred.value>(call, first, count, nullptr);
  });
}

void parameter_gradients(const NormBackward& call, std::int64_t first, std::int64_t width) {
  with_kind(call.dtype, call.mean, [&](auto type, auto centred) {
    backward_columns<decltype(type), centred.value>(call, first, width);
  });
}

void whole_block(const NormBackward& call, std::int64_t block, float* sums) {
  with_kind(call.dtype, call.mean, [&](auto type, auto centred) {
    const std::int64_t row = block * norm_row_block;
    std::fill_n(sums, (centred.value ? 2 : 1) * norm_sums_width(call.columns), 0.0f);
    backward_rows<true, decltype(type), centred.value>(call, row, std::min(norm_row_block, call.rows - row),
                                                       sums);
  });
}

/// Adds the totals of all columns, in the layout of whole_block(), to the parameters' gradients.
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

/// Threads share the columns of the parameters' gradients, and then the rows of dx, so x and dy are read
/// twice.
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
  // The workspace holds the totals, followed by the sums of as many blocks as fit. The same numbers are added
  // in the same order either way.
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
