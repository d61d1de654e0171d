#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cross_entropy.cpp"
#include <hwy/foreach_target.h>
// Must follow foreach_target.h.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/cross_entropy.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row-inl.h"
#include "tranche/kernels/cross_entropy.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

void accumulate_row(const CrossEntropyCall& call, std::int64_t row) {
  const FloatTag d;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const float* logits = call.logits + row * call.columns;
  FloatVector highest = hn::Set(d, -infinity);
  for_vectors(call.columns, [&](std::int64_t i, std::int64_t lanes) {
    highest = hn::Max(highest, keep_first(load_at(logits, i, lanes), lanes, hn::Set(d, -infinity)));
  });
  const float maximum = std::max(call.maximum[row], max_of(highest));
  // If every logit so far is -infinity, any finite offset keeps their exponentials 0 instead of NaN.
  const float offset = maximum == -infinity ? 0.0f : maximum;
  const FloatVector offset_vector = hn::Set(d, offset);
  FloatVector sum = hn::Zero(d);
  for_vectors(call.columns, [&](std::int64_t i, std::int64_t lanes) {
    const FloatVector term = exp(hn::Sub(load_at(logits, i, lanes), offset_vector));
    sum = hn::Add(sum, keep_first(term, lanes, hn::Zero(d)));
  });
  call.sum[row] = call.sum[row] * std::exp(call.maximum[row] - offset) + sum_of(sum);
  call.maximum[row] = maximum;
  const std::int64_t column = call.targets[row] - call.first_column;
  if (column >= 0 && column < call.columns) call.target_logit[row] = logits[column];
}

template <class T>
void gradient_row(const CrossEntropyCall& call, std::int64_t row) {
  const FloatTag d;
  const float* logits = call.logits + row * call.columns;
  T* gradient = static_cast<T*>(call.d_logits) + row * call.columns;
  if (call.targets[row] == ignored_label) {
    for_vectors(call.columns,
                [&](std::int64_t i, std::int64_t lanes) { store_at(hn::Zero(d), gradient, i, lanes); });
    return;
  }
  const std::int64_t column = call.targets[row] - call.first_column;
  const bool holds_target = column >= 0 && column < call.columns;
  const FloatVector maximum = hn::Set(d, call.maximum[row]);
  const FloatVector inverse_sum = hn::Set(d, 1.0f / call.sum[row]);
  const FloatVector scale = hn::Set(d, call.scale);
  float at_target = 0;  // computed before gradient may overwrite the logits
  if (holds_target) {
    const FloatVector logit = hn::Set(d, logits[column]);
    const FloatVector probability = hn::Mul(exp(hn::Sub(logit, maximum)), inverse_sum);
    at_target = (hn::GetLane(probability) - 1.0f) * call.scale;
  }
  for_vectors(call.columns, [&](std::int64_t i, std::int64_t lanes) {
    const FloatVector probability = hn::Mul(exp(hn::Sub(load_at(logits, i, lanes), maximum)), inverse_sum);
    store_at(hn::Mul(probability, scale), gradient, i, lanes);
  });
  if (holds_target) gradient[column] = from_float<T>(at_target);
}

void gradient_of_row(const CrossEntropyCall& call, std::int64_t row) {
  switch (call.gradient_dtype) {
    case DataType::bfloat16:
      return gradient_row<bfloat16>(call, row);
    case DataType::float16:
      return gradient_row<float16>(call, row);
    default:
      return gradient_row<float>(call, row);
  }
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(accumulate_row);
HWY_EXPORT(gradient_of_row);

void cross_entropy_begin(const CrossEntropyCall& call) {
  std::fill_n(call.maximum, call.rows, -std::numeric_limits<float>::infinity());
  std::fill_n(call.sum, call.rows, 0.0f);
  // A label that no chunk contains then makes the loss NaN.
  std::fill_n(call.target_logit, call.rows, std::numeric_limits<float>::quiet_NaN());
}

void cross_entropy_accumulate(const CrossEntropyCall& call) {
  const auto run = HWY_DYNAMIC_DISPATCH(accumulate_row);
  parallel_ranges(call.threads, call.rows, row_grain(call.columns),
                  [&](std::int64_t first, std::int64_t count) {
                    for (std::int64_t row = first; row < first + count; ++row) run(call, row);
                  });
}

void cross_entropy_combine(const CrossEntropyCall& call) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (std::int64_t row = 0; row < call.rows; ++row) {
    float maximum = -infinity, sum = 0, target_logit = std::numeric_limits<float>::quiet_NaN();
    for (std::int64_t rank = 0; rank < call.ranks; ++rank) {
      const float* state = call.states + rank * 3 * call.rows + row;
      const float highest = std::max(maximum, state[0]);
      // The offset stays finite while every logit is -infinity, as in accumulate_row().
      const float offset = highest == -infinity ? 0.0f : highest;
      sum = sum * std::exp(maximum - offset) + state[call.rows] * std::exp(state[0] - offset);
      maximum = highest;
      if (!std::isnan(state[2 * call.rows])) target_logit = state[2 * call.rows];
    }
    call.maximum[row] = maximum;
    call.sum[row] = sum;
    call.target_logit[row] = target_logit;
  }
}

void cross_entropy_finish(const CrossEntropyCall& call) {
  double loss = 0;
  std::int64_t tokens = 0;
  for (std::int64_t row = 0; row < call.rows; ++row) {
    if (call.targets[row] == ignored_label) continue;
    loss += std::log(static_cast<double>(call.sum[row])) + static_cast<double>(call.maximum[row]) -
            static_cast<double>(call.target_logit[row]);
    ++tokens;
  }
  *call.loss_sum += loss;
  *call.token_count += tokens;
}

void cross_entropy_gradient(const CrossEntropyCall& call) {
  const auto run = HWY_DYNAMIC_DISPATCH(gradient_of_row);
  parallel_ranges(call.threads, call.rows, row_grain(call.columns),
                  [&](std::int64_t first, std::int64_t count) {
                    for (std::int64_t row = first; row < first + count; ++row) run(call, row);
                  });
}

}  // namespace tranche::kernels::cpu
#endif
