// The fixed-order sum over ranks, and digests. Compiled without contraction; additions and their order are
// the CPU's.

#include <algorithm>

#include "kernels/cuda/conversions.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/reduction.h"
#include "kernels/cuda/vector_loop.h"
#include "kernels/digest_mix.h"

namespace tranche::kernels::cuda {

namespace {

/// The pointers to the operands are kernel parameters. CUDA allows 32764 bytes of them, so that one launch is
/// enough for any sum; most calls need few.
constexpr int few_pieces = 64;
constexpr int batch = 4;  // operands whose loads are in flight at once

template <int capacity>
struct PieceList {
  const void* pieces[capacity];
  int count;
  int group_size, outer_size;  ///< operands in a group, and groups in an outer group
  bool accumulate;
  bool folds;  ///< the outer groups' sums are added to `out` one by one
};

/// Bytes per element: pieces * size(piece) + size(out), and size(out) again to accumulate.
template <int n, class Piece, class Out, int capacity>
__device__ __forceinline__ void sum_group(const PieceList<capacity>& list, const Out& out, std::int64_t i) {
  float total[n] = {}, outer[n] = {}, partial[n] = {};
  int in_group = 0, in_outer = 0;
  bool first_outer = !list.folds;
  if (list.folds) Out::template widen<n>(out.template load<n>(i), total);
  for (int base = 0; base < list.count; base += batch) {
    typename Elements<Piece>::template Loaded<n> loaded[batch] = {};
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      if (base + b < list.count) {
        loaded[b] = load_raw<typename Elements<Piece>::template Loaded<n>>(
            static_cast<const Piece*>(list.pieces[base + b]) + i);
      }
    }
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      if (base + b >= list.count) break;
      float values[n];
      Elements<Piece>::template widen<n>(loaded[b], values);
      // Every sum starts with its first operand itself, because 0 + -0 would lose the sign.
#pragma unroll
      for (int k = 0; k < n; ++k) partial[k] = in_group == 0 ? values[k] : partial[k] + values[k];
      const bool last = base + b + 1 == list.count;
      if (++in_group < list.group_size && !last) continue;
      in_group = 0;
#pragma unroll
      for (int k = 0; k < n; ++k) outer[k] = in_outer == 0 ? partial[k] : outer[k] + partial[k];
      if (++in_outer < list.outer_size && !last) continue;
      in_outer = 0;
#pragma unroll
      for (int k = 0; k < n; ++k) total[k] = first_outer ? outer[k] : total[k] + outer[k];
      first_outer = false;
    }
  }
  if (list.accumulate && !list.folds) {
    float held[n];
    Out::template widen<n>(out.template load<n>(i), held);
#pragma unroll
    for (int k = 0; k < n; ++k) total[k] = held[k] + total[k];
  }
  out.template store<n>(i, total);
}

template <int width, class Piece, class Out, int capacity>
__global__ void __launch_bounds__(vector_loop_threads)
    ordered_sum_kernel(const PieceList<capacity> list, const Out out, const VectorRange range) {
  const std::int64_t step = std::int64_t{gridDim.x} * vector_loop_threads;
  for (std::int64_t group = blockIdx.x * std::int64_t{vector_loop_threads} + threadIdx.x;
       group < range.groups; group += step) {
    sum_group<width, Piece>(list, out, range.first_of(group));
  }
  const int thread = static_cast<int>(threadIdx.x);
  if (width > 1 && blockIdx.x == 0 && thread < range.edges()) {
    sum_group<1, Piece>(list, out, range.edge(thread));
  }
}

/// The range on which all operands and `out` are aligned.
VectorRange range_of_pieces(std::span<const void* const> pieces, std::int64_t piece_bytes, int width,
                            const TensorView& out) {
  const auto first = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pieces[0]));
  const bool alike = std::all_of(pieces.begin(), pieces.end(), [&](const void* piece) {
    return (reinterpret_cast<std::uintptr_t>(piece) - first) % 16 == 0;
  });
  if (!alike) return {out.elements(), out.elements(), 1, 0};
  return vector_range(
      out.elements(), width,
      {demand_of(pieces[0], piece_bytes, width), demand_of(out.data, size_of(out.dtype), width)});
}

template <class Piece, class Out, int capacity>
void launch_ordered_sum(Stream& stream, std::span<const void* const> pieces, SumGroups groups,
                        bool accumulate, const TensorView& view, const Out& out) {
  constexpr int width = std::min(16 / Elements<Piece>::bytes, 16 / Out::bytes);
  PieceList<capacity> list;
  std::fill(std::copy(pieces.begin(), pieces.end(), list.pieces), list.pieces + capacity, nullptr);
  list.count = static_cast<int>(pieces.size());
  list.accumulate = accumulate;
  list.folds = accumulate && groups.size <= 0;
  list.group_size = groups.size < 0 ? -groups.size : std::max(groups.size, 1);
  list.outer_size = groups.outer;
  const VectorRange range = range_of_pieces(pieces, Elements<Piece>::bytes, width, view);
  const auto kernel = range.width == width ? ordered_sum_kernel<width, Piece, Out, capacity>
                                           : ordered_sum_kernel<1, Piece, Out, capacity>;
  launch(stream, "ordered_sum", kernel, vector_loop_shape(range, 1), list, out, range);
}

/// Bytes per element: 4 + size(out), and size(out) again to accumulate.
template <class Communication, class Out>
struct RoundedSum {
  template <int n>
  struct Loaded {
    typename Elements<float>::template Loaded<n> source;
    typename Out::template Loaded<n> held;
  };
  Elements<float> source;
  Out out;
  bool accumulate;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    Loaded<n> loaded = {};
    loaded.source = source.template load<n>(i);
    if (accumulate) loaded.held = out.template load<n>(i);
    return loaded;
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float values[n], held[n];
    Elements<float>::template widen<n>(loaded.source, values);
    Out::template widen<n>(loaded.held, held);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      if constexpr (!std::is_same_v<Communication, float>)
        values[k] = widened(narrowed<Communication>(values[k]));
      if (accumulate) values[k] = held[k] + values[k];
    }
    out.template store<n>(i, values);
  }
};

constexpr int digest_unroll = 4;

/// Bytes per element: size(values). Bound by arithmetic: six 64-bit products per element for each of the
/// digest's words. Sums wrap, so the order of the blocks' atomic additions does not matter.
template <int width, class Values>
__global__ void __launch_bounds__(vector_loop_threads)
    digest_kernel(const Values values, const Digest origin, const std::int64_t first_element, Digest* digest,
                  const VectorRange range) {
  Digest sum;
  const auto take = [&]<int n>(std::int64_t i) {
    float elements[n];
    Values::template widen<n>(values.template load<n>(i), elements);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      sum += digest_of(origin, static_cast<std::uint64_t>(first_element + i + k), elements[k]);
    }
  };
  const std::int64_t step = std::int64_t{gridDim.x} * vector_loop_threads;
  for (std::int64_t group = blockIdx.x * std::int64_t{vector_loop_threads} + threadIdx.x;
       group < range.groups; group += step) {
    take.template operator()<width>(range.first_of(group));
  }
  const int thread = static_cast<int>(threadIdx.x);
  if (width > 1 && blockIdx.x == 0 && thread < range.edges()) {
    take.template operator()<1>(range.edge(thread));
  }
  unsigned long long lanes[2] = {sum.lanes[0], sum.lanes[1]};
#pragma unroll
  for (auto& lane : lanes) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) lane += __shfl_xor_sync(0xffffffffu, lane, distance);
  }
  if (thread % warp_size == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&digest->lanes[0]), lanes[0]);
    atomicAdd(reinterpret_cast<unsigned long long*>(&digest->lanes[1]), lanes[1]);
  }
}

}  // namespace

void ordered_sum(Stream& stream, std::span<const void* const> pieces, DataType piece_dtype, SumGroups groups,
                 bool accumulate, const TensorView& out) {
  if (out.elements() == 0) return;
  with_storage(piece_dtype, [&](auto storage) {
    using Piece = decltype(storage);
    if (pieces.size() > few_pieces) {
      return launch_ordered_sum<Piece, AnyElements, most_pieces>(stream, pieces, groups, accumulate, out,
                                                                 any_elements_of(out));
    }
    with_storage(out.dtype, [&](auto result) {
      using Out = Elements<decltype(result)>;
      launch_ordered_sum<Piece, Out, few_pieces>(stream, pieces, groups, accumulate, out, Out{out.data});
    });
  });
}

void rounded_sum(Stream& stream, const ConstTensorView& source, DataType communication, bool accumulate,
                 const TensorView& out) {
  with_storage(communication, [&](auto storage) {
    with_storage(out.dtype, [&](auto result) {
      using Communication = decltype(storage);
      using Out = Elements<decltype(result)>;
      constexpr int width = 4;
      const VectorRange range = vector_range(
          out.elements(), width,
          {demand_of(source.data, size_of(source.dtype), width), demand_of(out.data, Out::bytes, width)});
      launch_vector_loop<width, 2>(
          stream, "rounded_sum",
          RoundedSum<Communication, Out>{{const_cast<void*>(source.data)}, {out.data}, accumulate}, range);
    });
  });
}

void add_digest(Stream& stream, const ConstTensorView& values, std::uint64_t tensor,
                std::int64_t first_element, Digest* digest) {
  with_storage(values.dtype, [&](auto storage) {
    using Values = Elements<decltype(storage)>;
    constexpr int width = 16 / Values::bytes;
    const VectorRange range =
        vector_range(values.elements(), width, {demand_of(values.data, Values::bytes, width)});
    const auto kernel = range.width == width ? digest_kernel<width, Values> : digest_kernel<1, Values>;
    launch(stream, "add_digest", kernel, vector_loop_shape(range, digest_unroll),
           Values{const_cast<void*>(values.data)}, digest_origin(tensor), first_element, digest, range);
  });
}

}  // namespace tranche::kernels::cuda
