// SwiGLU. fp32 elements use the CPU's formulas, with contracted multiply-adds and therefore other bits.
// 16-bit elements use the hardware's base-2 exponential and approximate division, as GELU does; their
// relative errors of about 1e-6 vanish in the rounding to 8 or 11 bits.

#include "kernels/cuda/swiglu.h"

#include <type_traits>

#include "kernels/cuda/elements.h"
#include "kernels/cuda/vector_loop.h"
#include "kernels/silu_arithmetic.h"

namespace tranche::kernels::cuda {

namespace {

struct FastSilu {
  __device__ __forceinline__ static float exponential(float x) {
    return exponential_of_two(x * 1.44269504088896341f);
  }
  __device__ __forceinline__ static float inverse(float x) { return __fdividef(1.0f, x); }
};

template <class T>
__device__ __forceinline__ SiluElement silu(float x) {
  return silu_element<std::conditional_t<std::is_same_v<T, float>, AccurateSilu, FastSilu>>(x);
}

/// Bytes per element: size(gate) + size(up) + size(out).
template <class T>
struct Forward {
  template <int n>
  struct Loaded {
    typename Elements<T>::template Loaded<n> gate, up;
  };
  Elements<T> gate, up, out;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return {gate.template load<n>(i), up.template load<n>(i)};
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float values[n], factors[n];
    Elements<T>::template widen<n>(loaded.gate, values);
    Elements<T>::template widen<n>(loaded.up, factors);
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = silu<T>(values[k]).value * factors[k];
    out.template store_fast<n>(i, values);
  }
};

/// Bytes per element: three elements read and three written.
template <class T>
struct ForwardBackward {
  template <int n>
  struct Loaded {
    typename Elements<T>::template Loaded<n> gate, up, d_out;
  };
  Elements<T> gate, up, d_out, out, d_gate, d_up;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return {gate.template load<n>(i), up.template load<n>(i), d_out.template load<n>(i)};
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float values[n], factors[n], gradients[n], products[n];
    Elements<T>::template widen<n>(loaded.gate, values);
    Elements<T>::template widen<n>(loaded.up, factors);
    Elements<T>::template widen<n>(loaded.d_out, gradients);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const SiluElement activated = silu<T>(values[k]);
      products[k] = activated.value * factors[k];
      values[k] = gradients[k] * factors[k] * activated.derivative;
      gradients[k] = gradients[k] * activated.value;
    }
    out.template store_fast<n>(i, products);
    d_gate.template store_fast<n>(i, values);
    d_up.template store_fast<n>(i, gradients);
  }
};

}  // namespace

void swiglu_forward(Stream& stream, const ConstTensorView& gate, const ConstTensorView& up,
                    const TensorView& out) {
  with_storage(gate.dtype, [&](auto storage) {
    using T = decltype(storage);
    constexpr int width = 16 / Elements<T>::bytes;
    const auto demand = [](const ConstTensorView& view) { return demand_of(view.data, sizeof(T), width); };
    launch_vector_loop<width, 1>(
        stream, "swiglu_forward", Forward<T>{elements_of<T>(gate), elements_of<T>(up), elements_of<T>(out)},
        vector_range(gate.elements(), width, {demand(gate), demand(up), demand(out)}));
  });
}

void swiglu_forward_backward(Stream& stream, const ConstTensorView& gate, const ConstTensorView& up,
                             const ConstTensorView& d_out, const TensorView& out, const TensorView& d_gate,
                             const TensorView& d_up) {
  with_storage(gate.dtype, [&](auto storage) {
    using T = decltype(storage);
    constexpr int width = 16 / Elements<T>::bytes;
    const auto demand = [](const ConstTensorView& view) { return demand_of(view.data, sizeof(T), width); };
    launch_vector_loop<width, 1>(
        stream, "swiglu_forward_backward",
        ForwardBackward<T>{elements_of<T>(gate), elements_of<T>(up), elements_of<T>(d_out),
                           elements_of<T>(out), elements_of<T>(d_gate), elements_of<T>(d_up)},
        vector_range(gate.elements(), width,
                     {demand(gate), demand(up), demand(d_out), demand(out), demand(d_gate), demand(d_up)}));
  });
}

}  // namespace tranche::kernels::cuda
