// Fused optimizer updates: one launch, one read of gradient and state, one write of state and weight.
// Compiled without contraction; update_arithmetic.h is the scalar definition that the CPU's loops compute, so
// the bits are the CPU's.
//
// Bytes per element, Adam: gradient + 12 read, 12 + weight written (28 with 16-bit gradient and weight). Some
// 60 instructions an element, most of them IEEE's two divisions and square root, are a third of what the
// multiprocessors can issue in that time.

#include "kernels/cuda/optimizer_update.h"

#include "kernels/cuda/elements.h"
#include "kernels/cuda/stretch_loop.h"
#include "kernels/update_arithmetic.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int width = 4;   // 16 bytes of the fp32 state, 8 of what is 16-bit
constexpr int unroll = 2;  // 112 bytes of loads under way in a thread

/// The arguments of an update: by value, or in device memory when `device` is not null.
template <class Arguments>
struct ArgumentSource {
  Arguments value;
  const Arguments* device;

  __device__ __forceinline__ Arguments read() const { return device != nullptr ? *device : value; }
};

/// The compute-dtype copy, if there is one.
template <int n>
__device__ __forceinline__ void store_weight(const AnyElements& weight, std::int64_t i, const float (&w)[n]) {
  if (weight.data != nullptr) weight.store<n>(i, w);
}

template <class Gradient, class Moment>
struct Adam {
  template <int n>
  struct Loaded {
    typename Elements<Gradient>::template Loaded<n> gradient;
    typename Elements<float>::template Loaded<n> master;
    typename Elements<Moment>::template Loaded<n> exp_avg, exp_avg_sq;
  };
  AdamArguments arguments;
  Elements<Gradient> gradient;
  Elements<float> master;
  Elements<Moment> exp_avg, exp_avg_sq;
  AnyElements weight;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return {gradient.template load<n>(i), master.load<n>(i), exp_avg.template load<n>(i),
            exp_avg_sq.template load<n>(i)};
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float g[n], w[n], m[n], v[n];
    Elements<Gradient>::template widen<n>(loaded.gradient, g);
    Elements<float>::widen<n>(loaded.master, w);
    Elements<Moment>::template widen<n>(loaded.exp_avg, m);
    Elements<Moment>::template widen<n>(loaded.exp_avg_sq, v);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      adam_element(arguments, g[k], w[k], m[k], v[k], [](float x) { return __fsqrt_rn(x); });
    }
    master.store<n>(i, w);
    exp_avg.template store<n>(i, m);
    exp_avg_sq.template store<n>(i, v);
    store_weight<n>(weight, i, w);
  }
};

template <class Gradient, class Moment>
struct Sgd {
  template <int n>
  struct Loaded {
    typename Elements<Gradient>::template Loaded<n> gradient;
    typename Elements<float>::template Loaded<n> master;
    typename Elements<Moment>::template Loaded<n> buffer;
  };
  SgdArguments arguments;
  Elements<Gradient> gradient;
  Elements<float> master;
  Elements<Moment> buffer;
  AnyElements weight;

  __device__ __forceinline__ bool has_momentum() const {
    return buffer.data != nullptr && arguments.momentum != 0;
  }
  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    Loaded<n> loaded{gradient.template load<n>(i), master.load<n>(i), {}};
    if (has_momentum() && !arguments.first_step) loaded.buffer = buffer.template load<n>(i);
    return loaded;
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float g[n], w[n];
    Elements<Gradient>::template widen<n>(loaded.gradient, g);
    Elements<float>::widen<n>(loaded.master, w);
    if (has_momentum()) {
      float b[n];
      Elements<Moment>::template widen<n>(loaded.buffer, b);
#pragma unroll
      for (int k = 0; k < n; ++k) sgd_momentum_element(arguments, g[k], w[k], b[k]);
      buffer.template store<n>(i, b);
    } else {
#pragma unroll
      for (int k = 0; k < n; ++k) sgd_element(arguments, g[k], w[k]);
    }
    master.store<n>(i, w);
    store_weight<n>(weight, i, w);
  }
};

template <int group, class Operation, class Arguments>
__global__ void __launch_bounds__(stretch_threads)
    update_kernel(Operation operation, const ArgumentSource<Arguments> source, const Stretch stretch) {
  operation.arguments = source.read();
  if (!operation.arguments.apply) return;
  for_stretch<group, unroll>(operation, stretch);
}

template <class Operation, class Arguments>
void launch_update(Stream& stream, const char* name, const Operation& operation,
                   const ArgumentSource<Arguments>& source, const Stretch& stretch) {
  const auto kernel = stretch.width == width ? update_kernel<width, Operation, Arguments>
                                             : update_kernel<1, Operation, Arguments>;
  launch(stream, name, kernel, stretch_shape(stretch, unroll), operation, source, stretch);
}

Demand demand_of(const ConstTensorView& view) {
  return cuda::demand_of(view.data, size_of(view.dtype), width);
}
/// A view that is not there demands nothing.
Demand demand_of_optional(const ConstTensorView& view) {
  return view.data == nullptr ? Demand{} : demand_of(view);
}

/// Calls f with values of the gradient's and the moments' storage types.
template <class F>
void with_types(DataType gradient, DataType moment, const F& f) {
  with_storage(gradient, [&](auto g) {
    if (moment == DataType::bfloat16) {
      f(g, bfloat16{});
    } else {
      f(g, float{});
    }
  });
}

void adam(Stream& stream, const ArgumentSource<AdamArguments>& source, const ConstTensorView& gradient,
          const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
          const TensorView& weight) {
  const Stretch stretch = stretch_of(master.elements(), width,
                                     {demand_of(gradient), demand_of(master), demand_of(exp_avg),
                                      demand_of(exp_avg_sq), demand_of_optional(weight)});
  with_types(gradient.dtype, exp_avg.dtype, [&](auto g, auto moment) {
    using G = decltype(g);
    using M = decltype(moment);
    launch_update(stream, "adam_update",
                  Adam<G, M>{{},
                             elements_of<G>(gradient),
                             elements_of<float>(master),
                             elements_of<M>(exp_avg),
                             elements_of<M>(exp_avg_sq),
                             any_elements_of(weight)},
                  source, stretch);
  });
}

void sgd(Stream& stream, const ArgumentSource<SgdArguments>& source, const ConstTensorView& gradient,
         const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight) {
  const Stretch stretch = stretch_of(master.elements(), width,
                                     {demand_of(gradient), demand_of(master),
                                      demand_of_optional(momentum_buffer), demand_of_optional(weight)});
  with_types(gradient.dtype, momentum_buffer.dtype, [&](auto g, auto moment) {
    using G = decltype(g);
    using M = decltype(moment);
    launch_update(stream, "sgd_update",
                  Sgd<G, M>{{},
                            elements_of<G>(gradient),
                            elements_of<float>(master),
                            elements_of<M>(momentum_buffer),
                            any_elements_of(weight)},
                  source, stretch);
  });
}

}  // namespace

void adam_update(Stream& stream, const AdamArguments& arguments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight) {
  adam(stream, {arguments, nullptr}, gradient, master, exp_avg, exp_avg_sq, weight);
}
void adam_update(Stream& stream, const AdamArguments* device_arguments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight) {
  adam(stream, {{}, device_arguments}, gradient, master, exp_avg, exp_avg_sq, weight);
}

void sgd_update(Stream& stream, const SgdArguments& arguments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight) {
  sgd(stream, {arguments, nullptr}, gradient, master, momentum_buffer, weight);
}
void sgd_update(Stream& stream, const SgdArguments* device_arguments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight) {
  sgd(stream, {{}, device_arguments}, gradient, master, momentum_buffer, weight);
}

}  // namespace tranche::kernels::cuda
