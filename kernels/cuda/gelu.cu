// GELU and its derivative. fp32 elements use the CPU's formulas, with contracted multiply-adds and therefore
// other bits. 16-bit elements use the hardware's base-2 exponential and approximate division, whose relative
// errors of about 1e-6 vanish in the rounding to 8 or 11 bits. With the accurate exponential they would be
// bound by arithmetic: some 45 instructions for 4 bytes of traffic.

#include "kernels/cuda/elements.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/vector_loop.h"
#include "kernels/gelu_arithmetic.h"

namespace tranche::kernels::cuda {

namespace {

constexpr float log2_e = 1.44269504088896341f;

struct Accurate {
  __device__ __forceinline__ static float value(float x) { return gelu_element(x); }
  __device__ __forceinline__ static float derivative(float x) { return gelu_derivative_element(x); }
};

struct Fast {
  /// The exponent of 2: -2u log2(e).
  __device__ __forceinline__ static float exponent(float x) {
    return x * (gelu_two_root * log2_e + gelu_two_root_cubic * log2_e * (x * x));
  }
  __device__ __forceinline__ static float value(float x) {
    return __fdividef(x, 1.0f + exponential_of_two(fminf(exponent(x), 126.0f)));
  }
  __device__ __forceinline__ static float derivative(float given) {
    const float x = given > 16.0f ? 16.0f : given < -16.0f ? -16.0f : given;  // NaNs stay NaNs
    const float e = exponential_of_two(fminf(exponent(x), 115.0f));
    const float s = __fdividef(1.0f, 1.0f + e);
    const float slope = -gelu_two_root - 3.0f * gelu_two_root_cubic * (x * x);
    return s + (x * s) * ((e * s) * slope);
  }
};

/// Bytes per element: size(x) + size(y).
template <class Math, class X, class Y>
struct Forward {
  template <int n>
  using Loaded = typename X::template Loaded<n>;
  X x;
  Y y;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return x.template load<n>(i);
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float values[n];
    X::template widen<n>(loaded, values);
#pragma unroll
    for (float& value : values) value = Math::value(value);
    y.template store_fast<n>(i, values);
  }
};

/// Bytes per element: size(x) + size(dy) + size(dx).
template <class Math, class X, class Dy, class Dx>
struct Backward {
  template <int n>
  struct Loaded {
    typename X::template Loaded<n> x;
    typename Dy::template Loaded<n> dy;
  };
  X x;
  Dy dy;
  Dx dx;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return {x.template load<n>(i), dy.template load<n>(i)};
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float values[n], gradients[n];
    X::template widen<n>(loaded.x, values);
    Dy::template widen<n>(loaded.dy, gradients);
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = gradients[k] * Math::derivative(values[k]);
    dx.template store_fast<n>(i, values);
  }
};

template <class T>
using MathOf = std::conditional_t<std::is_same_v<T, float>, Accurate, Fast>;

}  // namespace

void gelu_forward(Stream& stream, const ConstTensorView& x, const TensorView& y) {
  const auto run = [&]<int width>(const auto& operation) {
    launch_vector_loop<width, 2>(stream, "gelu_forward", operation,
                                 vector_range(x.elements(), width,
                                              {demand_of(x.data, size_of(x.dtype), width),
                                               demand_of(y.data, size_of(y.dtype), width)}));
  };
  if (x.dtype != y.dtype) {
    return run.operator()<4>(
        Forward<Accurate, AnyElements, AnyElements>{any_elements_of(x), any_elements_of(y)});
  }
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    run.template operator()<16 / Elements<T>::bytes>(
        Forward<MathOf<T>, Elements<T>, Elements<T>>{elements_of<T>(x), elements_of<T>(y)});
  });
}

void gelu_backward(Stream& stream, const ConstTensorView& x, const ConstTensorView& dy,
                   const TensorView& dx) {
  const auto run = [&]<int width>(const auto& operation) {
    launch_vector_loop<width, 1>(stream, "gelu_backward", operation,
                                 vector_range(x.elements(), width,
                                              {demand_of(x.data, size_of(x.dtype), width),
                                               demand_of(dy.data, size_of(dy.dtype), width),
                                               demand_of(dx.data, size_of(dx.dtype), width)}));
  };
  if (x.dtype != dy.dtype || x.dtype != dx.dtype) {
    return run.operator()<4>(Backward<Accurate, AnyElements, AnyElements, AnyElements>{
        any_elements_of(x), any_elements_of(dy), any_elements_of(dx)});
  }
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    run.template operator()<16 / Elements<T>::bytes>(
        Backward<MathOf<T>, Elements<T>, Elements<T>, Elements<T>>{elements_of<T>(x), elements_of<T>(dy),
                                                                   elements_of<T>(dx)});
  });
}

}  // namespace tranche::kernels::cuda
