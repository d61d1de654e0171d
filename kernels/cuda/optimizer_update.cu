// Fused optimizer updates: one launch for a table of segments, which its parameters carry, one read of
// gradient and state, one write of state and weight.
// Compiled without contraction; update_arithmetic.h is the scalar definition that the CPU's loops compute, so
// the bits are the CPU's.
//
// Bytes per element, Adam: gradient + 12 read, 12 + weight written (28 with 16-bit gradient and weight). Some
// 60 instructions an element, most of them IEEE's two divisions and square root, are a third of what the
// multiprocessors can issue in that time.

#include "kernels/cuda/optimizer_update.h"

#include <array>

#include "kernels/cuda/elements.h"
#include "kernels/cuda/vector_loop.h"
#include "kernels/update_arithmetic.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int width = 4;   // 16 bytes of the fp32 state, 8 of what is 16-bit
constexpr int unroll = 2;  // 112 bytes of loads in flight in a thread

/// A segment and the thread blocks that compute it: those from where the one before ends up to `end_block`.
struct Part {
  std::int64_t first, elements;
  unsigned end_block;
  std::uint16_t group;
  std::uint8_t width, head;  ///< as in VectorRange
};
/// As many as the 4 KiB of a kernel's parameters hold beside its operands.
constexpr int most_parts = 128;
struct Parts {
  Part list[most_parts];
  int count;
};
static_assert(sizeof(Parts) < 3200);

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

/// An operation on the elements from `first` on.
template <class Operation>
struct From {
  template <int n>
  using Loaded = typename Operation::template Loaded<n>;
  const Operation& operation;
  std::int64_t first;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return operation.template load<n>(first + i);
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    operation.template finish<n>(first + i, loaded);
  }
};

template <class Operation, class Arguments>
__global__ void __launch_bounds__(vector_loop_threads)
    update_kernel(Operation operation, const unsigned char* arguments, const std::int64_t stride,
                  const Parts parts) {
  int lower = 0, upper = parts.count - 1;
  while (lower < upper) {
    const int middle = (lower + upper) / 2;
    if (blockIdx.x < parts.list[middle].end_block) {
      upper = middle;
    } else {
      lower = middle + 1;
    }
  }
  const Part& part = parts.list[lower];
  operation.arguments = *reinterpret_cast<const Arguments*>(arguments + part.group * stride);
  if (!operation.arguments.apply) return;
  const unsigned begin_block = lower == 0 ? 0 : parts.list[lower - 1].end_block;
  const unsigned block = blockIdx.x - begin_block, blocks = part.end_block - begin_block;
  const VectorRange range{part.elements, (part.elements - part.head) / part.width, part.width, part.head};
  const From<Operation> from{operation, part.first};
  if (part.width == width) {
    for_vector_range<width, unroll>(from, range, block, blocks);
  } else {
    for_vector_range<1, unroll>(from, range, block, blocks);
  }
}

/// One launch for each most_parts segments that are not empty. `demands` are those of the range's first
/// element.
template <class Operation, class Arguments>
void launch_update(Stream& stream, const char* name, const Operation& operation,
                   const GroupArguments<Arguments>& arguments, std::span<const UpdateSegment> segments,
                   const std::array<Demand, 5>& demands) {
  Parts parts{};
  unsigned blocks = 0;
  const auto flush = [&] {
    if (parts.count == 0) return;
    launch(stream, name, update_kernel<Operation, Arguments>, {.grid = blocks, .block = vector_loop_threads},
           operation, reinterpret_cast<const unsigned char*>(arguments.first), arguments.stride, parts);
    parts.count = 0;
    blocks = 0;
  };
  for (const UpdateSegment& segment : segments) {
    if (segment.count == 0) continue;
    const auto from = [&](const Demand& demand) {
      return Demand{demand.offset + static_cast<std::uint64_t>(segment.first * demand.step), demand.step,
                    demand.modulus};
    };
    const VectorRange range = vector_range(
        segment.count, width,
        {from(demands[0]), from(demands[1]), from(demands[2]), from(demands[3]), from(demands[4])});
    blocks += vector_loop_shape(range, unroll).grid.x;
    parts.list[parts.count++] = {segment.first,
                                 segment.count,
                                 blocks,
                                 static_cast<std::uint16_t>(segment.group),
                                 static_cast<std::uint8_t>(range.width),
                                 static_cast<std::uint8_t>(range.head)};
    if (parts.count == most_parts) flush();
  }
  flush();
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

}  // namespace

void adam_update(Stream& stream, const GroupArguments<AdamArguments>& arguments,
                 std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight) {
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
                  arguments, segments,
                  {demand_of(gradient), demand_of(master), demand_of(exp_avg), demand_of(exp_avg_sq),
                   demand_of_optional(weight)});
  });
}

void sgd_update(Stream& stream, const GroupArguments<SgdArguments>& arguments,
                std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight) {
  with_types(gradient.dtype, momentum_buffer.dtype, [&](auto g, auto moment) {
    using G = decltype(g);
    using M = decltype(moment);
    launch_update(stream, "sgd_update",
                  Sgd<G, M>{{},
                            elements_of<G>(gradient),
                            elements_of<float>(master),
                            elements_of<M>(momentum_buffer),
                            any_elements_of(weight)},
                  arguments, segments,
                  {demand_of(gradient), demand_of(master), demand_of_optional(momentum_buffer),
                   demand_of_optional(weight)});
  });
}

}  // namespace tranche::kernels::cuda
