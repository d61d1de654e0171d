#include "tranche/kernels/cpu/optimizer_update.h"

#include "tranche/kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tranche/kernels/cpu/optimizer_update.cpp"
#include "hwy/foreach_target.h"
#include "tranche/kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

template <class Gradient, class Moment>
HWY_INLINE void adam_loop(const AdamArguments& arguments, const void* gradient_data, const TensorView& master,
                          const TensorView& exp_avg, const TensorView& exp_avg_sq, const TensorView& weight,
                          std::int64_t first, std::int64_t count) {
  const auto* gradient = static_cast<const Gradient*>(gradient_data) + first;
  float* w_data = static_cast<float*>(master.data) + first;
  auto* m_data = static_cast<Moment*>(exp_avg.data) + first;
  auto* v_data = static_cast<Moment*>(exp_avg_sq.data) + first;
  const float decay =
      arguments.decoupled ? arguments.learning_rate * arguments.weight_decay : arguments.weight_decay;
  const float rest1 = 1.0f - arguments.beta1;
  const float rest2 = 1.0f - arguments.beta2;
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    auto g = hn::Mul(load(d, gradient + i), hn::Set(d, arguments.gradient_scale));
    auto w = load(d, w_data + i);
    const auto decayed = hn::Mul(hn::Set(d, decay), w);
    if (arguments.decoupled) {
      w = hn::Sub(w, decayed);
    } else {
      g = hn::Add(g, decayed);
    }
    const auto m =
        hn::Add(hn::Mul(hn::Set(d, arguments.beta1), load(d, m_data + i)), hn::Mul(hn::Set(d, rest1), g));
    const auto v = hn::Add(hn::Mul(hn::Set(d, arguments.beta2), load(d, v_data + i)),
                           hn::Mul(hn::Mul(hn::Set(d, rest2), g), g));
    const auto denominator =
        hn::Add(hn::Div(hn::Sqrt(v), hn::Set(d, arguments.correction2_sqrt)), hn::Set(d, arguments.epsilon));
    w = hn::Sub(w, hn::Mul(hn::Set(d, arguments.step_size), hn::Div(m, denominator)));
    store(d, w, w_data + i);
    store(d, m, m_data + i);
    store(d, v, v_data + i);
    if (weight.data != nullptr) store_any(d, w, weight.dtype, weight.data, first + i);
  });
}

void adam(const AdamArguments& arguments, const ConstTensorView& gradient, const TensorView& master,
          const TensorView& exp_avg, const TensorView& exp_avg_sq, const TensorView& weight,
          std::int64_t first, std::int64_t count) {
  with_floating(gradient.dtype, [&](auto g) HWY_ATTR {
    if (exp_avg.dtype == DataType::bfloat16) {
      adam_loop<decltype(g), bfloat16>(arguments, gradient.data, master, exp_avg, exp_avg_sq, weight, first,
                                       count);
    } else {
      adam_loop<decltype(g), float>(arguments, gradient.data, master, exp_avg, exp_avg_sq, weight, first,
                                    count);
    }
  });
}

template <class Gradient, class Moment>
HWY_INLINE void sgd_loop(const SgdArguments& arguments, const void* gradient_data, const TensorView& master,
                         const TensorView& momentum_buffer, const TensorView& weight, std::int64_t first,
                         std::int64_t count) {
  const auto* gradient = static_cast<const Gradient*>(gradient_data) + first;
  float* w_data = static_cast<float*>(master.data) + first;
  auto* b_data = arguments.momentum == 0 ? nullptr : static_cast<Moment*>(momentum_buffer.data) + first;
  const float rest = 1.0f - arguments.dampening;
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    auto w = load(d, w_data + i);
    const auto g = hn::Add(hn::Mul(load(d, gradient + i), hn::Set(d, arguments.gradient_scale)),
                           hn::Mul(hn::Set(d, arguments.weight_decay), w));
    auto direction = g;
    if (b_data != nullptr) {
      const auto momentum = hn::Set(d, arguments.momentum);
      auto b = g;
      if (!arguments.first_step) {
        b = hn::Add(hn::Mul(momentum, load(d, b_data + i)), hn::Mul(hn::Set(d, rest), g));
      }
      direction = arguments.nesterov ? hn::Add(g, hn::Mul(momentum, b)) : b;
      store(d, b, b_data + i);
    }
    w = hn::Sub(w, hn::Mul(hn::Set(d, arguments.learning_rate), direction));
    store(d, w, w_data + i);
    if (weight.data != nullptr) store_any(d, w, weight.dtype, weight.data, first + i);
  });
}

void sgd(const SgdArguments& arguments, const ConstTensorView& gradient, const TensorView& master,
         const TensorView& momentum_buffer, const TensorView& weight, std::int64_t first,
         std::int64_t count) {
  with_floating(gradient.dtype, [&](auto g) HWY_ATTR {
    if (momentum_buffer.dtype == DataType::bfloat16) {
      sgd_loop<decltype(g), bfloat16>(arguments, gradient.data, master, momentum_buffer, weight, first,
                                      count);
    } else {
      sgd_loop<decltype(g), float>(arguments, gradient.data, master, momentum_buffer, weight, first, count);
    }
  });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(adam);
HWY_EXPORT(sgd);

void adam_update(int threads, const AdamArguments& arguments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight) {
  if (!arguments.apply) return;
  parallel_ranges(threads, master.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(adam)(arguments, gradient, master, exp_avg, exp_avg_sq, weight, first, count);
  });
}

void sgd_update(int threads, const SgdArguments& arguments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight) {
  if (!arguments.apply) return;
  parallel_ranges(threads, master.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(sgd)(arguments, gradient, master, momentum_buffer, weight, first, count);
  });
}

}  // namespace tranche::kernels::cpu
#endif
