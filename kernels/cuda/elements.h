#pragma once
/// Groups of neighbouring elements of the floating dtypes in registers. A load or store is one access of the
/// group's bytes, a power of two up to 16; a group of more than four fp32 numbers takes several.

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/conversions.h"
#include "kernels/cuda/simt.h"
#include "tranche/core/tensor_view.h"

namespace tranche::kernels::cuda {

/// The bytes of a group as they are in memory, whatever their type.
template <int bytes>
struct [[gnu::may_alias]] alignas(bytes < 16 ? bytes : 16) Raw {
  std::uint32_t words[bytes / 4];
};
template <>
struct [[gnu::may_alias]] alignas(2) Raw<2> {
  std::uint16_t words[1];
};

/// Makes one access (with memcpy the compiler would copy byte by byte).
template <class R>
__device__ __forceinline__ R load_raw(const void* from) {
  return *static_cast<const R*>(from);
}
template <class R>
__device__ __forceinline__ void store_raw(void* to, const R& raw) {
  *static_cast<R*>(to) = raw;
}

/// Elements of a dtype known to the compiler. Both const and mutable views convert to it; a kernel stores
/// only where its caller could.
template <class T>
struct Elements {
  using Storage = T;
  static constexpr int bytes = static_cast<int>(sizeof(T));
  template <int n>
  using Loaded = Raw<n * bytes>;

  void* data;

  __device__ __forceinline__ T* at(std::int64_t i) const { return static_cast<T*>(data) + i; }
  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return load_raw<Loaded<n>>(at(i));
  }
  template <int n>
  __device__ __forceinline__ static void widen(const Loaded<n>& raw, float (&values)[n]) {
    if constexpr (bytes == 4) {
#pragma unroll
      for (int k = 0; k < n; ++k) values[k] = std::bit_cast<float>(raw.words[k]);
    } else if constexpr (n == 1) {
      values[0] = widened(T{raw.words[0]});
    } else {
#pragma unroll
      for (int k = 0; k < n; k += 2) {
        values[k] = widened(T{static_cast<std::uint16_t>(raw.words[k / 2] & 0xffffu)});
        values[k + 1] = widened(T{static_cast<std::uint16_t>(raw.words[k / 2] >> 16)});
      }
    }
  }
  /// Rounds as core does, NaNs included.
  template <int n>
  __device__ __forceinline__ void store(std::int64_t i, const float (&values)[n]) const {
    Loaded<n> raw;
    if constexpr (bytes == 4) {
#pragma unroll
      for (int k = 0; k < n; ++k) raw.words[k] = std::bit_cast<std::uint32_t>(values[k]);
    } else if constexpr (n == 1) {
      raw.words[0] = narrowed<T>(values[0]).bits;
    } else {
#pragma unroll
      for (int k = 0; k < n; k += 2) {
        raw.words[k / 2] = static_cast<std::uint32_t>(narrowed<T>(values[k]).bits) |
                           static_cast<std::uint32_t>(narrowed<T>(values[k + 1]).bits) << 16;
      }
    }
    store_raw(at(i), raw);
  }
  /// Rounds by the hardware's packed conversion: every NaN becomes one.
  template <int n>
  __device__ __forceinline__ void store_fast(std::int64_t i, const float (&values)[n]) const {
    if constexpr (bytes == 4 || n == 1) {
      store<n>(i, values);
    } else {
      Loaded<n> raw;
#pragma unroll
      for (int k = 0; k < n; k += 2) raw.words[k / 2] = pack_two<T>(values[k], values[k + 1]);
      store_raw(at(i), raw);
    }
  }
};

/// Elements of a dtype known only at run time; every thread takes the same branch. A group is kept in its
/// memory format until it is widened, so that further loads do not wait for it.
struct AnyElements {
  static constexpr int bytes = 4;  ///< of the widest dtype
  template <int n>
  struct Loaded {
    Raw<4 * n> raw;  ///< 16-bit elements use the first half
    DataType dtype;
  };

  void* data;
  DataType dtype;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    Loaded<n> loaded;
    loaded.dtype = dtype;
    if (dtype == DataType::float32) {
      loaded.raw = Elements<float>{data}.load<n>(i);
    } else {
      const Raw<2 * n> raw = load_raw<Raw<2 * n>>(static_cast<const std::uint16_t*>(data) + i);
#pragma unroll
      for (int k = 0; k < (n + 1) / 2; ++k) loaded.raw.words[k] = raw.words[k];
    }
    return loaded;
  }
  template <int n>
  __device__ __forceinline__ static void widen(const Loaded<n>& loaded, float (&values)[n]) {
    switch (loaded.dtype) {
      case DataType::bfloat16:
        return widen_halves<bfloat16, n>(loaded, values);
      case DataType::float16:
        return widen_halves<float16, n>(loaded, values);
      default:
        return Elements<float>::widen<n>(loaded.raw, values);
    }
  }
  template <int n>
  __device__ __forceinline__ void store(std::int64_t i, const float (&values)[n]) const {
    switch (dtype) {
      case DataType::bfloat16:
        return Elements<bfloat16>{data}.store<n>(i, values);
      case DataType::float16:
        return Elements<float16>{data}.store<n>(i, values);
      default:
        return Elements<float>{data}.store<n>(i, values);
    }
  }
  template <int n>
  __device__ __forceinline__ void store_fast(std::int64_t i, const float (&values)[n]) const {
    store<n>(i, values);
  }

 private:
  template <class T, int n>
  __device__ __forceinline__ static void widen_halves(const Loaded<n>& loaded, float (&values)[n]) {
    Raw<2 * n> raw;
    using Word = std::remove_reference_t<decltype(raw.words[0])>;
#pragma unroll
    for (int k = 0; k < (n + 1) / 2; ++k) raw.words[k] = static_cast<Word>(loaded.raw.words[k]);
    Elements<T>::template widen<n>(raw, values);
  }
};

template <class T>
Elements<T> elements_of(const ConstTensorView& view) {
  return {const_cast<void*>(view.data)};
}
inline AnyElements any_elements_of(const ConstTensorView& view) {
  return {const_cast<void*>(view.data), view.dtype};
}

/// Calls f with a value of the storage type.
template <class F>
decltype(auto) with_storage(DataType dtype, const F& f) {
  switch (dtype) {
    case DataType::bfloat16:
      return f(bfloat16{});
    case DataType::float16:
      return f(float16{});
    default:
      return f(float{});
  }
}

}  // namespace tranche::kernels::cuda
