#include "kernels/cpu/swiglu.h"

#include "kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/swiglu.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/exponential-inl.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

template <class D>
struct Silu {
  hn::VFromD<D> value, derivative;
};

/// As silu_element() of kernels/silu_arithmetic.h.
template <class D>
HWY_INLINE Silu<D> silu(D d, hn::VFromD<D> x) {
  const auto one = hn::Set(d, 1.0f), limit = hn::Set(d, 80.0f);
  const auto bounded = hn::IfThenElse(hn::IsNaN(x), x, hn::Max(hn::Min(x, limit), hn::Neg(limit)));
  const auto e = exponential(d, hn::Neg(bounded));
  const auto s = hn::Div(one, hn::Add(one, e));
  const auto far_left = hn::Lt(x, hn::Neg(limit));
  return {hn::IfThenElse(far_left, hn::Mul(x, hn::Zero(d)), hn::Mul(x, s)),
          hn::Add(s, hn::Mul(hn::Mul(bounded, s), hn::Mul(e, s)))};
}

void forward(const ConstTensorView& gate_view, const ConstTensorView& up_view, const TensorView& out_view,
             std::int64_t first, std::int64_t count) {
  with_floating(gate_view.dtype, [&](auto type) {
    using T = decltype(type);
    const T* gate = static_cast<const T*>(gate_view.data) + first;
    const T* up = static_cast<const T*>(up_view.data) + first;
    T* out = static_cast<T*>(out_view.data) + first;
    for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
      store(d, hn::Mul(silu(d, load(d, gate + i)).value, load(d, up + i)), out + i);
    });
  });
}

void forward_backward(const ConstTensorView& gate_view, const ConstTensorView& up_view,
                      const ConstTensorView& d_out_view, const TensorView& out_view,
                      const TensorView& d_gate_view, const TensorView& d_up_view, std::int64_t first,
                      std::int64_t count) {
  with_floating(gate_view.dtype, [&](auto type) {
    using T = decltype(type);
    const T* gate = static_cast<const T*>(gate_view.data) + first;
    const T* up = static_cast<const T*>(up_view.data) + first;
    const T* d_out = static_cast<const T*>(d_out_view.data) + first;
    T* out = static_cast<T*>(out_view.data) + first;
    T* d_gate = static_cast<T*>(d_gate_view.data) + first;
    T* d_up = static_cast<T*>(d_up_view.data) + first;
    for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
      const auto activated = silu(d, load(d, gate + i));
      const auto factor = load(d, up + i), gradient = load(d, d_out + i);
      store(d, hn::Mul(activated.value, factor), out + i);
      store(d, hn::Mul(hn::Mul(gradient, factor), activated.derivative), d_gate + i);
      store(d, hn::Mul(gradient, activated.value), d_up + i);
    });
  });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(forward);
HWY_EXPORT(forward_backward);

void swiglu_forward(int threads, const ConstTensorView& gate, const ConstTensorView& up,
                    const TensorView& out) {
  const auto run = HWY_DYNAMIC_DISPATCH(forward);
  parallel_ranges(threads, gate.elements(), parallel_grain / 4,
                  [&](std::int64_t first, std::int64_t count) { run(gate, up, out, first, count); });
}

void swiglu_forward_backward(int threads, const ConstTensorView& gate, const ConstTensorView& up,
                             const ConstTensorView& d_out, const TensorView& out, const TensorView& d_gate,
                             const TensorView& d_up) {
  const auto run = HWY_DYNAMIC_DISPATCH(forward_backward);
  parallel_ranges(threads, gate.elements(), parallel_grain / 4, [&](std::int64_t first, std::int64_t count) {
    run(gate, up, d_out, out, d_gate, d_up, first, count);
  });
}

}  // namespace tranche::kernels::cpu
#endif
