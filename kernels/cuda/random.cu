// Dropout and random fills. The draws are core's Philox blocks; a group starts at a multiple of four draws,
// so each block is computed once. Compiled without contraction: masks, uniform numbers and scaled elements
// have the CPU's bits. Normal numbers use logarithm, sine and cosine in fp64; they differ from the CPU's by
// at most one fp32 unit in the last place, if the libraries round differently.
//
// A Philox block takes about 40 integer instructions for four elements. So dropout of 16-bit elements (4
// bytes each) is bound by these as much as by memory, and fills of normal numbers are bound by fp64
// arithmetic.

#include "kernels/cuda/elements.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/vector_loop.h"
#include "kernels/dropout_draws.h"

namespace tranche::kernels::cuda {

namespace {

using detail::unchecked_random_block;

/// Draws of elements [first, first + n) of a stream; first is a multiple of 4 unless n is 1.
template <int n>
__device__ __forceinline__ void draw(const RandomKey& key, std::int64_t first, std::uint32_t (&draws)[n]) {
  if constexpr (n == 1) {
    const auto block = unchecked_random_block(key, static_cast<std::uint64_t>(first >> 2));
    const std::uint32_t low = first & 1 ? block[1] : block[0];
    const std::uint32_t high = first & 1 ? block[3] : block[2];
    draws[0] = first & 2 ? high : low;
  } else {
#pragma unroll
    for (int k = 0; k < n; k += 4) {
      const auto block = unchecked_random_block(key, static_cast<std::uint64_t>((first + k) >> 2));
      draws[k] = block[0];
      draws[k + 1] = block[1];
      draws[k + 2] = block[2];
      draws[k + 3] = block[3];
    }
  }
}

struct UniformNumbers {
  template <int n>
  struct Loaded {};
  Elements<float> out;
  RandomKey key;
  std::int64_t first_element;
  float low, range;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t) const {
    return {};
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>&) const {
    std::uint32_t draws[n];
    float values[n];
    draw<n>(key, first_element + i, draws);
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = low + range * detail::uniform_of(draws[k]);
    out.store<n>(i, values);
  }
};

struct NormalNumbers {
  template <int n>
  struct Loaded {};
  Elements<float> out;
  RandomKey key;
  std::int64_t first_element;
  float mean, standard_deviation;

  /// Both numbers of the pair of words (a, b), as in core/random.cpp.
  __device__ __forceinline__ static void box_muller(std::uint32_t a, std::uint32_t b, float& even,
                                                    float& odd) {
    const double radius = sqrt(-2.0 * log((static_cast<double>(a) + 1.0) * 0x1p-32));
    const double angle = 6.283185307179586 * (static_cast<double>(b) * 0x1p-32);
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    even = static_cast<float>(radius * cosine);
    odd = static_cast<float>(radius * sine);
  }
  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t) const {
    return {};
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>&) const {
    const std::int64_t element = first_element + i;
    float values[n];
    if constexpr (n == 1) {
      const auto block = unchecked_random_block(key, static_cast<std::uint64_t>(element >> 2));
      const bool upper = (element & 2) != 0;
      float even, odd;
      box_muller(upper ? block[2] : block[0], upper ? block[3] : block[1], even, odd);
      values[0] = element & 1 ? odd : even;
    } else {
      static_assert(n == 4);
      const auto block = unchecked_random_block(key, static_cast<std::uint64_t>(element >> 2));
      box_muller(block[0], block[1], values[0], values[1]);
      box_muller(block[2], block[3], values[2], values[3]);
    }
#pragma unroll
    for (float& value : values) value = mean + standard_deviation * value;
    out.store<n>(i, values);
  }
};

VectorRange fill_range(const TensorView& out, const RandomKey& key, std::int64_t first_element) {
  if (out.elements() > 0) {
    // Throws for a stream that is too short, as drawing on the CPU does.
    random_block(key, static_cast<std::uint64_t>(first_element + out.elements() - 1) / 4);
  }
  return vector_range(out.elements(), 4,
                      {demand_of(out.data, 4, 4), {static_cast<std::uint64_t>(first_element), 1, 4}});
}

constexpr int sample_capacity = 256;
struct SampleList {
  std::int64_t samples[sample_capacity];
};

template <class X, class Y>
struct MaskedScale {
  template <int n>
  using Loaded = typename X::template Loaded<n>;
  X x;
  Y y;
  DropoutDraws draws;
  RandomKey key;
  std::int64_t offset;  ///< offset of the sample's first element in this call
  std::int64_t first;   ///< index of that element within the sample

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return x.template load<n>(offset + i);
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    std::uint32_t drawn[n];
    float values[n];
    draw<n>(key, first + i, drawn);
    X::template widen<n>(loaded, values);
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = draws.keeps(drawn[k]) ? values[k] * draws.scale : 0.0f;
    y.template store<n>(offset + i, values);
  }
};

/// Bytes per element: size(x) + size(y). Block row y processes sample y of the list.
template <int width, class X, class Y>
__global__ void __launch_bounds__(vector_loop_threads)
    dropout_kernel(const X x, const Y y, const DropoutDraws draws, const SampleList list,
                   const std::int64_t first_sample, const std::int64_t first_element,
                   const VectorRange range) {
  const RandomKey key = draws.key(list.samples[blockIdx.y]);
  const MaskedScale<X, Y> operation{
      x, y, draws, key, (first_sample + blockIdx.y) * range.elements, first_element};
  for_vector_range<width, 2>(operation, range, blockIdx.x, gridDim.x);
}

template <int width, class X, class Y>
void launch_dropout(Stream& stream, const DropoutOptions& options, const X& x, const Y& y,
                    const VectorRange& range) {
  const DropoutDraws draws = dropout_draws(options);
  const std::size_t samples = options.samples.size();
  for (std::size_t first = 0; first < samples; first += sample_capacity) {
    const std::size_t count = std::min<std::size_t>(sample_capacity, samples - first);
    SampleList list{};
    std::copy_n(options.samples.begin() + static_cast<std::ptrdiff_t>(first), count, list.samples);
    LaunchShape shape = vector_loop_shape(range, 2);
    shape.grid.y = static_cast<unsigned>(count);
    launch(stream, "dropout", dropout_kernel<width, X, Y>, shape, x, y, draws, list,
           static_cast<std::int64_t>(first), options.first_element, range);
  }
}

/// Some columns of all rows of a matrix (DropoutOptions::row_elements).
struct ColumnPart {
  std::int64_t columns, run, apart, first_column, row_elements, rows_per_sample;
};

template <class X, class Y>
struct MaskedColumns {
  template <int n>
  using Loaded = typename X::template Loaded<n>;
  X x;
  Y y;
  DropoutDraws draws;
  RandomKey key;
  ColumnPart part;
  std::int64_t first_row;  ///< first row within the sample

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return x.template load<n>(first_row * part.columns + i);
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    static_assert(n == 1, "neighbouring elements of a part may lie apart in the whole");
    const std::int64_t row = i / part.columns, column = i % part.columns;
    const std::int64_t element =
        row * part.row_elements + column / part.run * part.apart + part.first_column + column % part.run;
    std::uint32_t drawn[n];
    float values[n];
    draw<n>(key, element, drawn);
    X::template widen<n>(loaded, values);
    values[0] = draws.keeps(drawn[0]) ? values[0] * draws.scale : 0.0f;
    y.template store<n>(first_row * part.columns + i, values);
  }
};

/// Bytes per element: size(x) + size(y). Block row y processes sample y of the list.
template <class X, class Y>
__global__ void __launch_bounds__(vector_loop_threads)
    dropout_columns_kernel(const X x, const Y y, const DropoutDraws draws, const SampleList list,
                           const std::int64_t first_sample, const ColumnPart part, const VectorRange range) {
  const MaskedColumns<X, Y> operation{x,     y,
                                      draws, draws.key(list.samples[blockIdx.y]),
                                      part,  (first_sample + blockIdx.y) * part.rows_per_sample};
  for_vector_range<1, 2>(operation, range, blockIdx.x, gridDim.x);
}

void dropout_columns(Stream& stream, const DropoutOptions& options, const ConstTensorView& x,
                     const TensorView& y) {
  const std::int64_t columns = x.shape[x.shape.rank() - 1];
  const std::size_t samples = options.samples.size();
  const ColumnPart part{columns,
                        columns / options.column_blocks,
                        options.row_elements / options.column_blocks,
                        options.sample_offset + options.first_column,
                        options.row_elements,
                        x.elements() / columns / static_cast<std::int64_t>(samples)};
  const DropoutDraws draws = dropout_draws(options);
  const std::int64_t per_sample = part.rows_per_sample * columns;
  const VectorRange range{per_sample, per_sample, 1, 0};
  for (std::size_t first = 0; first < samples; first += sample_capacity) {
    const std::size_t count = std::min<std::size_t>(sample_capacity, samples - first);
    SampleList list{};
    std::copy_n(options.samples.begin() + static_cast<std::ptrdiff_t>(first), count, list.samples);
    LaunchShape shape = vector_loop_shape(range, 2);
    shape.grid.y = static_cast<unsigned>(count);
    const auto from = any_elements_of(x);
    const auto to = any_elements_of(y);
    launch(stream, "dropout", dropout_columns_kernel<decltype(from), decltype(to)>, shape, from, to, draws,
           list, static_cast<std::int64_t>(first), part, range);
  }
}

/// x holds the same range of each sample, from options.first_element on.
template <int width, class X, class Y>
void dropout_of(Stream& stream, const DropoutOptions& options, const ConstTensorView& x, const TensorView& y,
                const X& from, const Y& to) {
  const std::int64_t per_sample = x.elements() / static_cast<std::int64_t>(options.samples.size());
  VectorRange range = vector_range(per_sample, width,
                                   {demand_of(x.data, size_of(x.dtype), width),
                                    demand_of(y.data, size_of(y.dtype), width),
                                    {static_cast<std::uint64_t>(options.first_element), 1, 4}});
  // Every sample must have the alignment of the first.
  if (options.samples.size() > 1 && per_sample % width != 0) range = {per_sample, per_sample, 1, 0};
  if (range.width == width) {
    launch_dropout<width>(stream, options, from, to, range);
  } else {
    launch_dropout<1>(stream, options, from, to, range);
  }
}

void dropout_samples(Stream& stream, const DropoutOptions& options, const ConstTensorView& x,
                     const TensorView& y) {
  if (x.dtype != y.dtype) {
    return dropout_of<4>(stream, options, x, y, any_elements_of(x), any_elements_of(y));
  }
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    dropout_of<16 / Elements<T>::bytes>(stream, options, x, y, elements_of<T>(x), elements_of<T>(y));
  });
}

}  // namespace

void fill_normal(Stream& stream, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                 float mean, float standard_deviation) {
  launch_vector_loop<4, 1>(stream, "fill_normal",
                           NormalNumbers{{out.data}, key, first_element, mean, standard_deviation},
                           fill_range(out, key, first_element));
}

void fill_uniform(Stream& stream, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                  float low, float high) {
  launch_vector_loop<4, 1>(stream, "fill_uniform",
                           UniformNumbers{{out.data}, key, first_element, low, high - low},
                           fill_range(out, key, first_element));
}

void dropout(Stream& stream, const DropoutOptions& options, const ConstTensorView& x, const TensorView& y) {
  if (x.elements() == 0) return;
  if (options.row_elements != 0) return dropout_columns(stream, options, x, y);
  if (options.sample_elements == 0) {
    DropoutOptions whole = options;
    whole.first_element = options.sample_offset;
    return dropout_samples(stream, whole, x, y);
  }
  // The operand consists of the end of one sample, whole samples, the beginning of another, and elements
  // after the last sample.
  const std::int64_t each = options.sample_elements, last = static_cast<std::int64_t>(options.samples.size());
  for (std::int64_t done = 0, elements = 0; done < x.elements(); done += elements) {
    const std::int64_t left = x.elements() - done, at = options.first_element + done, sample = at / each;
    if (sample >= last) return fill_zero(stream, y.slice(done, left));
    DropoutOptions part = options;
    const std::int64_t in_sample = at % each;
    part.first_element = options.sample_offset + in_sample;
    const std::int64_t whole = in_sample > 0 ? 0 : std::min(left / each, last - sample);
    part.samples = options.samples.subspan(static_cast<std::size_t>(sample),
                                           static_cast<std::size_t>(std::max<std::int64_t>(whole, 1)));
    elements = whole > 0 ? whole * each : std::min(each - in_sample, left);
    dropout_samples(stream, part, x.slice(done, elements), y.slice(done, elements));
  }
}

}  // namespace tranche::kernels::cuda
