#include <array>
#include <cstdint>

#include "hwy/cache_control.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gelu.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/activation-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

// The tanh form is x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3): it needs one exponential and,
// unlike 1 + tanh(u), has no cancellation for negative x. The exponential is our own, so that the bits are
// the same on every instruction set. Measured against fp64: 2.3 units in the last place for x >= -1; below
// that the relative error grows with |2u|, whose rounding the exponential amplifies, to 1.2e-5 at 2u = -69
// (gelu = -1e-29). The derivative's error is at most 2e-7.

inline constexpr float two_root = -1.5957691216057308f;     // -2 sqrt(2 / pi)
inline constexpr float two_root_cubic = -0.0713548162726f;  // the same times 0.044715

/// exp(-2u), with the argument clamped to the exponential's range; beyond it 1 + exp(-2u) is 1 or the result
/// vanishes.
template <class D>
HWY_INLINE hn::VFromD<D> exponential_of_minus_2u(D d, hn::VFromD<D> x) {
  const auto factor = hn::Add(hn::Set(d, two_root), hn::Mul(hn::Set(d, two_root_cubic), hn::Mul(x, x)));
  const auto limit = hn::Set(d, 80.0f);
  return exponential(d, hn::Max(hn::Min(hn::Mul(x, factor), limit), hn::Neg(limit)));
}

/// gelu(x), where `e` is exp(-2u).
template <class D>
HWY_INLINE hn::VFromD<D> value_of(D d, hn::VFromD<D> x, hn::VFromD<D> e) {
  const auto ratio = hn::Div(x, hn::Add(hn::Set(d, 1.0f), e));
  // Below -16 gelu is smaller than every fp32 number; the product gives -0 there, and NaN for -infinity.
  const auto far_left = hn::Lt(x, hn::Set(d, -16.0f));
  return hn::IfThenElse(far_left, hn::Mul(x, hn::Zero(d)), ratio);
}

/// Beyond 16 the derivative is 0 or 1 to the last bit; clamping keeps x^2 finite. NaNs stay NaNs. exp(-2u) is
/// at its own bounds there, so it is the same for x and for the clamped x.
template <class D>
HWY_INLINE hn::VFromD<D> clamped(D d, hn::VFromD<D> x) {
  const auto bound = hn::Set(d, 16.0f);
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Max(hn::Min(x, bound), hn::Neg(bound)));
}

/// gelu'(x) for a clamped x, where `e` is exp(-2u).
template <class D>
HWY_INLINE hn::VFromD<D> derivative_of(D d, hn::VFromD<D> x, hn::VFromD<D> e) {
  const auto one = hn::Set(d, 1.0f);
  const auto s = hn::Div(one, hn::Add(one, e));
  // gelu' = s + x s (1 - s) 2u', where 1 - s = e s and 2u' = 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2).
  const auto slope =
      hn::Sub(hn::Set(d, -two_root), hn::Mul(hn::Set(d, 3.0f * two_root_cubic), hn::Mul(x, x)));
  return hn::Add(s, hn::Mul(hn::Mul(x, s), hn::Mul(hn::Mul(e, s), slope)));
}

/// y = gelu(x) and dx = dy gelu'(x); either may be left out.
void gelu(const ConstTensorView& x_view, const ConstTensorView& dy_view, const TensorView& y_view,
          const TensorView& dx_view, bool streaming, std::int64_t first, std::int64_t count) {
  with_floating(x_view.dtype, [&](auto type) {
    using T = decltype(type);
    const auto from = [&](const void* data) {
      return data == nullptr ? nullptr : static_cast<const T*>(data) + first;
    };
    const auto to = [&](void* data) { return data == nullptr ? nullptr : static_cast<T*>(data) + first; };
    const T *x = from(x_view.data), *dy = from(dy_view.data);
    T *y = to(y_view.data), *dx = to(dx_view.data);
    const auto value = [&](auto d, auto at, std::int64_t offset, auto e)
                           HWY_ATTR { return value_of(d, at(d, x + offset), e); };
    const auto gradient = [&](auto d, auto at, std::int64_t offset, auto e) HWY_ATTR {
      return hn::Mul(at(d, dy + offset), derivative_of(d, clamped(d, at(d, x + offset)), e));
    };
    const auto run = [&](const auto& results, const auto& body) {
      const auto exponential = [](auto d, auto v) HWY_ATTR { return exponential_of_minus_2u(d, v); };
      for_each_activation(x, count, results, streaming, exponential, body);
    };
    if (dx == nullptr) {
      run(std::array{y}, [&](auto... at) HWY_ATTR { return std::array{value(at...)}; });
    } else if (y == nullptr) {
      run(std::array{dx}, [&](auto... at) HWY_ATTR { return std::array{gradient(at...)}; });
    } else {
      run(std::array{y, dx}, [&](auto... at) HWY_ATTR { return std::array{value(at...), gradient(at...)}; });
    }
  });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(gelu);

namespace {

void activate(int threads, const ConstTensorView& x, const ConstTensorView& dy, const TensorView& y,
              const TensorView& dx) {
  const auto is_apart = [&](const TensorView& to) {
    return to.data == nullptr || is_streamed(to.data, to.bytes(), {x.data, dy.data});
  };
  const bool streaming = is_apart(y) && is_apart(dx);
  const auto run = HWY_DYNAMIC_DISPATCH(gelu);
  parallel_ranges(threads, x.elements(), parallel_grain / 4, [&](std::int64_t first, std::int64_t count) {
    run(x, dy, y, dx, streaming, first, count);
    if (streaming) hwy::FlushStream();
  });
}

}  // namespace

void gelu_forward(int threads, const ConstTensorView& x, const TensorView& y) {
  activate(threads, x, {}, y, {});
}

void gelu_backward(int threads, const ConstTensorView& x, const ConstTensorView& dy, const TensorView& dx) {
  activate(threads, x, dy, {}, dx);
}

void gelu_forward_backward(int threads, const ConstTensorView& x, const ConstTensorView& dy,
                           const TensorView& y, const TensorView& dx) {
  activate(threads, x, dy, y, dx);
}

}  // namespace tranche::kernels::cpu
#endif
