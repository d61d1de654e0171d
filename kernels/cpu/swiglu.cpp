#include "kernels/cpu/swiglu.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/cache_control.h"
#include "kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/swiglu.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/activation-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// exp(-x), with x clamped as in silu_element() of kernels/silu_arithmetic.h; for bf16 as in
/// coarse_silu_element().
template <class T, class D>
HWY_INLINE hn::VFromD<D> exponential_of_minus(D d, hn::VFromD<D> x) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return coarse_power_of_two(d, hn::Mul(x, hn::Set(d, -1.44269504088896341f)));
  }
  // A NaN may become a bound here; silu() multiplies the result by a NaN.
  const auto limit = hn::Set(d, 80.0f);
  return exponential(d, hn::Neg(hn::Max(hn::Min(x, limit), hn::Neg(limit))));
}

template <class D>
struct Silu {
  hn::VFromD<D> value, derivative;
};

/// The vector form of silu_element() in kernels/silu_arithmetic.h; for bf16 of coarse_silu_element(). `e` is
/// exp(-x).
template <class T, class D>
HWY_INLINE Silu<D> silu(D d, hn::VFromD<D> x, hn::VFromD<D> e) {
  const auto one = hn::Set(d, 1.0f), limit = hn::Set(d, 80.0f);
  const auto s = hn::Div(one, hn::Add(one, e));
  if constexpr (std::is_same_v<T, bfloat16>) {
    // Min and Max return their second operand if one is NaN.
    const auto kept = hn::Max(hn::Neg(limit), hn::Min(limit, x));
    return {hn::Mul(x, s), hn::Add(s, hn::Mul(hn::Mul(kept, s), hn::Sub(one, s)))};
  }
  const auto far_left = hn::Lt(x, hn::Neg(limit));
  const auto factor = hn::IfThenElse(far_left, hn::Zero(d), s);
  const auto kept = hn::IfThenElse(hn::IsNaN(x), x, hn::Max(hn::Min(x, limit), hn::Neg(limit)));
  return {hn::Mul(x, factor), hn::Add(s, hn::Mul(hn::Mul(kept, s), hn::Mul(e, s)))};
}

/// Runs for_each_activation() over a gate, with its exponentials.
template <class T, std::size_t n, class Body>
HWY_INLINE void for_each_gate(const T* gate, std::int64_t count, const std::array<T*, n>& to, bool streaming,
                              const Body& body) {
  const auto exponential = [](auto d, auto x) HWY_ATTR { return exponential_of_minus<T>(d, x); };
  for_each_activation(gate, count, to, streaming, exponential, body);
}

void forward(const ConstTensorView& gate_view, const ConstTensorView& up_view, const TensorView& out_view,
             bool streaming, std::int64_t first, std::int64_t count) {
  with_floating(gate_view.dtype, [&](auto type) {
    using T = decltype(type);
    const T* gate = static_cast<const T*>(gate_view.data) + first;
    const T* up = static_cast<const T*>(up_view.data) + first;
    const std::array<T*, 1> out{static_cast<T*>(out_view.data) + first};
    for_each_gate(gate, count, out, streaming, [&](auto d, auto at, std::int64_t offset, auto e) HWY_ATTR {
      return std::array{hn::Mul(silu<T>(d, at(d, gate + offset), e).value, at(d, up + offset))};
    });
  });
}

void forward_backward(const ConstTensorView& gate_view, const ConstTensorView& up_view,
                      const ConstTensorView& d_out_view, const TensorView& out_view,
                      const TensorView& d_gate_view, const TensorView& d_up_view, bool streaming,
                      std::int64_t first, std::int64_t count) {
  with_floating(gate_view.dtype, [&](auto type) {
    using T = decltype(type);
    const auto read = [&](const ConstTensorView& view) { return static_cast<const T*>(view.data) + first; };
    const auto written = [&](const TensorView& view) { return static_cast<T*>(view.data) + first; };
    const T *gate = read(gate_view), *up = read(up_view), *d_out = read(d_out_view);
    const std::array<T*, 3> to{written(out_view), written(d_gate_view), written(d_up_view)};
    for_each_gate(gate, count, to, streaming, [&](auto d, auto at, std::int64_t offset, auto e) HWY_ATTR {
      const auto activated = silu<T>(d, at(d, gate + offset), e);
      const auto factor = at(d, up + offset), gradient = at(d, d_out + offset);
      return std::array{hn::Mul(activated.value, factor),
                        hn::Mul(hn::Mul(gradient, factor), activated.derivative),
                        hn::Mul(gradient, activated.value)};
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
  const bool streaming = is_streamed(out.data, out.bytes(), {gate.data, up.data});
  parallel_ranges(threads, gate.elements(), parallel_grain / 4, [&](std::int64_t first, std::int64_t count) {
    run(gate, up, out, streaming, first, count);
    if (streaming) hwy::FlushStream();
  });
}

void swiglu_forward_backward(int threads, const ConstTensorView& gate, const ConstTensorView& up,
                             const ConstTensorView& d_out, const TensorView& out, const TensorView& d_gate,
                             const TensorView& d_up) {
  const auto run = HWY_DYNAMIC_DISPATCH(forward_backward);
  const auto is_apart = [&](const TensorView& to) {
    return is_streamed(to.data, to.bytes(), {gate.data, up.data, d_out.data});
  };
  const bool streaming = is_apart(out) && is_apart(d_gate) && is_apart(d_up);
  parallel_ranges(threads, gate.elements(), parallel_grain / 4, [&](std::int64_t first, std::int64_t count) {
    run(gate, up, d_out, out, d_gate, d_up, streaming, first, count);
    if (streaming) hwy::FlushStream();
  });
}

}  // namespace tranche::kernels::cpu
#endif
