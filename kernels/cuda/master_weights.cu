// Splits master weights into halves and joins them. Bound by memory: 8 bytes per element in each direction.

#include "kernels/cuda/master_weights.h"

#include "kernels/cuda/master_elements.h"
#include "kernels/cuda/vector_loop.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int width = 4;

struct Split {
  template <int n>
  using Loaded = Elements<float>::Loaded<n>;
  Elements<float> values;
  MasterElements halves;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return values.load<n>(i);
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float numbers[n];
    Elements<float>::widen<n>(loaded, numbers);
    if (halves.data != nullptr) return halves.store<n>(i, numbers, {});
    std::uint16_t patterns[n];
#pragma unroll
    for (int k = 0; k < n; ++k) patterns[k] = detail::split_float(numbers[k]).high.bits;
    store_patterns<n>(halves.weight, i, patterns);
  }
};

struct Join {
  template <int n>
  using Loaded = MasterElements::Loaded<n>;
  MasterElements halves;
  Elements<float> values;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return halves.load<n>(i);
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    store_raw(values.at(i), loaded.raw);
  }
};

VectorRange range_of(const ConstTensorView& values, const void* high, const void* low) {
  return vector_range(
      values.elements(), width,
      {demand_of(values.data, 4, width), demand_of(high, 2, width), demand_of(low, 2, width)});
}

MasterElements halves_of(const ConstTensorView& high, const ConstTensorView& low) {
  return {const_cast<void*>(low.data), const_cast<void*>(high.data), DataType::uint16, DataType::bfloat16,
          WeightRounding::half_away};
}

}  // namespace

void split_halves(Stream& stream, const ConstTensorView& values, const TensorView& high,
                  const TensorView& low) {
  launch_vector_loop<width, 4>(stream, "split_halves",
                               Split{elements_of<float>(values), halves_of(high, low)},
                               range_of(values, high.data, low.data));
}

void join_halves(Stream& stream, const ConstTensorView& high, const ConstTensorView& low,
                 const TensorView& values) {
  launch_vector_loop<width, 4>(stream, "join_halves", Join{halves_of(high, low), elements_of<float>(values)},
                               range_of(values, high.data, low.data));
}

}  // namespace tranche::kernels::cuda
