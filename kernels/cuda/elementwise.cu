// Casts, fills, copies and sums. They are bound by memory: each input is read once, the output written once.
// Compiled without contraction; the conversions are core's, so the bits are the CPU's. A group has four
// elements if an operand is fp32 (16 bytes; 8 of a 16-bit operand), else eight, so that the accesses of a
// warp are always adjacent.

#include "kernels/cuda/elementwise.h"

#include "kernels/cuda/elements.h"
#include "kernels/cuda/vector_loop.h"

namespace tranche::kernels::cuda {

namespace {

template <class... Operands>
inline constexpr int group_width = std::min({8, 16 / Operands::bytes...});

/// Bytes per element: size(from) + size(to).
template <class From, class To>
struct Conversion {
  template <int n>
  using Loaded = typename From::template Loaded<n>;
  From from;
  To to;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return from.template load<n>(i);
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float values[n];
    From::template widen<n>(loaded, values);
    to.template store<n>(i, values);
  }
};

/// Bytes per element: size(out).
template <class Out>
struct Constant {
  template <int n>
  struct Loaded {};
  Out out;
  float value;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t) const {
    return {};
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>&) const {
    float values[n];
#pragma unroll
    for (float& element : values) element = value;
    out.template store<n>(i, values);
  }
};

/// Bytes per element: size(a) + size(b) + size(out).
template <class A, class B, class Out>
struct Sum {
  template <int n>
  struct Loaded {
    typename A::template Loaded<n> a;
    typename B::template Loaded<n> b;
  };
  A a;
  B b;
  Out out;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return {a.template load<n>(i), b.template load<n>(i)};
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float left[n], right[n];
    A::template widen<n>(loaded.a, left);
    B::template widen<n>(loaded.b, right);
#pragma unroll
    for (int k = 0; k < n; ++k) left[k] = left[k] + right[k];
    out.template store<n>(i, left);
  }
};

/// Bytes per element: twice size(x).
template <class X>
struct Product {
  template <int n>
  using Loaded = typename X::template Loaded<n>;
  X x;
  float factor;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return x.template load<n>(i);
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float values[n];
    X::template widen<n>(loaded, values);
#pragma unroll
    for (float& element : values) element = element * factor;
    x.template store<n>(i, values);
  }
};

template <class A, class B, class Out>
void sum(Stream& stream, const char* name, const ConstTensorView& a, const ConstTensorView& b,
         const TensorView& out, const Sum<A, B, Out>& operation) {
  constexpr int width = group_width<A, B, Out>;
  const VectorRange range =
      vector_range(out.elements(), width,
                   {demand_of(a.data, size_of(a.dtype), width), demand_of(b.data, size_of(b.dtype), width),
                    demand_of(out.data, size_of(out.dtype), width)});
  launch_vector_loop<width, 2>(stream, name, operation, range);
}

constexpr int bias_threads = 256;
constexpr int bias_rows = 8;  // rows whose loads a thread has in flight

/// Each thread x has a group of columns and keeps their bias in registers; y runs over rows.
template <class T, class Bias, int width>
__global__ void __launch_bounds__(bias_threads)
    add_bias_kernel(const Elements<T> x, const Bias bias, const std::int64_t rows,
                    const std::int64_t columns) {
  const std::int64_t column = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) * width;
  if (column >= columns) return;
  float shift[width];
  Bias::template widen<width>(bias.template load<width>(column), shift);
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.y;
  for (std::int64_t row = blockIdx.y * std::int64_t{blockDim.y} + threadIdx.y; row < rows;
       row += bias_rows * step) {
    typename Elements<T>::template Loaded<width> loaded[bias_rows] = {};
#pragma unroll
    for (int u = 0; u < bias_rows; ++u) {
      if (row + u * step < rows) loaded[u] = x.template load<width>((row + u * step) * columns + column);
    }
#pragma unroll
    for (int u = 0; u < bias_rows; ++u) {
      if (row + u * step >= rows) break;
      float values[width];
      Elements<T>::template widen<width>(loaded[u], values);
#pragma unroll
      for (int k = 0; k < width; ++k) values[k] = values[k] + shift[k];
      x.template store<width>((row + u * step) * columns + column, values);
    }
  }
}

template <class T, class Bias, int width>
void launch_add_bias(Stream& stream, const TensorView& x, const Bias& bias, std::int64_t columns) {
  const std::int64_t rows = x.elements() / columns;
  const std::int64_t groups = columns / width;
  const Tile tile = tile_of(groups, bias_threads);
  const auto across = static_cast<unsigned>((groups + tile.x - 1) / tile.x);
  const int waves = std::max(1, 16 / static_cast<int>(std::min(across, 16u)));
  const unsigned down =
      std::min(65535u, grid_blocks(rows, std::int64_t{bias_rows} * tile.y, multiprocessors(), 8, waves));
  launch(stream, "add_bias", add_bias_kernel<T, Bias, width>,
         {.grid = dim3(across, down), .block = dim3(tile.x, tile.y)}, elements_of<T>(x), bias, rows, columns);
}

}  // namespace

void cast(Stream& stream, const ConstTensorView& from, const TensorView& to) {
  if (from.dtype == to.dtype) return copy(stream, from, to);  // a copy keeps all bits, NaN payloads included
  with_storage(from.dtype, [&](auto source) {
    with_storage(to.dtype, [&](auto target) {
      using From = Elements<decltype(source)>;
      using To = Elements<decltype(target)>;
      if constexpr (!std::is_same_v<From, To>) {
        constexpr int width = group_width<From, To>;
        const VectorRange range =
            vector_range(to.elements(), width,
                         {demand_of(from.data, From::bytes, width), demand_of(to.data, To::bytes, width)});
        launch_vector_loop<width, 4>(stream, "cast",
                                     Conversion<From, To>{{const_cast<void*>(from.data)}, {to.data}}, range);
      }
    });
  });
}

void copy(Stream& stream, const ConstTensorView& from, const TensorView& to) {
  if (from.data == to.data || to.bytes() == 0) return;
  check_cuda(cudaMemcpyAsync(to.data, from.data, static_cast<std::size_t>(to.bytes()), cudaMemcpyDefault,
                             native(stream)),
             "copy");
}

void fill_zero(Stream& stream, const TensorView& out) {
  const std::int64_t bytes = out.bytes();
  const auto fill = [&](auto storage) {
    using Out = Elements<decltype(storage)>;
    constexpr int width = 16 / Out::bytes;
    launch_vector_loop<width, 4>(
        stream, "fill_zero", Constant<Out>{{out.data}, 0.0f},
        vector_range(bytes / Out::bytes, width, {demand_of(out.data, Out::bytes, width)}));
  };
  const std::uint64_t ends = reinterpret_cast<std::uintptr_t>(out.data) | static_cast<std::uint64_t>(bytes);
  if (ends % 4 == 0) return fill(float{});  // the bits of +0 are zeros in every dtype
  if (ends % 2 == 0) return fill(bfloat16{});
  check_cuda(cudaMemsetAsync(out.data, 0, static_cast<std::size_t>(bytes), native(stream)), "fill_zero");
}

void fill_constant(Stream& stream, const TensorView& out, float value) {
  with_storage(out.dtype, [&](auto target) {
    using Out = Elements<decltype(target)>;
    constexpr int width = 16 / Out::bytes;
    launch_vector_loop<width, 4>(
        stream, "fill_constant", Constant<Out>{{out.data}, value},
        vector_range(out.elements(), width, {demand_of(out.data, Out::bytes, width)}));
  });
}

void add(Stream& stream, const ConstTensorView& a, const ConstTensorView& b, const TensorView& out) {
  if (a.dtype != b.dtype || a.dtype != out.dtype) {
    return sum(stream, "add", a, b, out,
               Sum<AnyElements, AnyElements, AnyElements>{any_elements_of(a), any_elements_of(b),
                                                          any_elements_of(out)});
  }
  with_storage(out.dtype, [&](auto storage) {
    using T = decltype(storage);
    using Operand = Elements<T>;
    sum(stream, "add", a, b, out,
        Sum<Operand, Operand, Operand>{elements_of<T>(a), elements_of<T>(b), elements_of<T>(out)});
  });
}

void accumulate(Stream& stream, const ConstTensorView& x, const TensorView& accumulator) {
  if (accumulator.dtype != DataType::float32) return add(stream, accumulator, x, accumulator);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    sum(stream, "accumulate", accumulator, x, accumulator,
        Sum<Elements<float>, Elements<T>, Elements<float>>{elements_of<float>(accumulator), elements_of<T>(x),
                                                           elements_of<float>(accumulator)});
  });
}

void scale(Stream& stream, float factor, const TensorView& x) {
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    constexpr int width = 16 / Elements<T>::bytes;
    launch_vector_loop<width, 2>(
        stream, "scale", Product<Elements<T>>{elements_of<T>(x), factor},
        vector_range(x.elements(), width, {demand_of(x.data, Elements<T>::bytes, width)}));
  });
}

// Bytes per element: twice size(x); each block reads the bias once.
void add_bias(Stream& stream, const TensorView& x, const ConstTensorView& bias) {
  const std::int64_t columns = bias.elements();
  if (x.elements() == 0) return;
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    constexpr int width = 16 / Elements<T>::bytes;
    const int fits = row_width(
        columns, width,
        {demand_of(x.data, size_of(x.dtype), width), demand_of(bias.data, size_of(bias.dtype), width)});
    if (fits == width && bias.dtype == x.dtype) {
      launch_add_bias<T, Elements<T>, width>(stream, x, elements_of<T>(bias), columns);
    } else {
      launch_add_bias<T, AnyElements, 1>(stream, x, any_elements_of(bias), columns);
    }
  });
}

}  // namespace tranche::kernels::cuda
