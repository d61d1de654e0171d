#include "kernels/cpu/reduction.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <mutex>

#include "hwy/cache_control.h"
#include "kernels/cpu/parallel.h"
#include "kernels/digest_mix.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/reduction.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/squares-inl.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// An fp32 element that counts as its value rounded to another dtype.
template <class Communication>
struct Rounded {
  float value;
};
template <class D>
HWY_INLINE hn::VFromD<D> load(D d, const Rounded<bfloat16>* from) {
  const auto bits = rounded_to_upper(d, hn::LoadU(d, &from->value));
  return hn::BitCast(d, hn::And(bits, hn::Set(Bits<D>(), 0xffff0000u)));
}
template <class D>
HWY_INLINE hn::VFromD<D> load(D d, const Rounded<float16>* from) {
  float16 halves[hn::MaxLanes(D())];
  store(d, hn::LoadU(d, &from->value), halves);
  return load(d, halves);
}

/// `outer_size`: the most operands in an outer group.
template <class Piece, class Out>
HWY_INLINE void ordered_sum_loop(std::span<const void* const> pieces, std::size_t group_size,
                                 std::size_t outer_size, bool accumulate, Out* out, std::int64_t first,
                                 std::int64_t count, bool folds = false) {
  const std::size_t all = pieces.size(), first_end = std::min(outer_size, all);
  const bool plain = !folds && first_end == all;
  for_each_vector(count, [&](auto d, std::int64_t offset) HWY_ATTR {
    const std::int64_t i = first + offset;
    const auto piece = [&](std::size_t rank)
                           HWY_ATTR { return load(d, static_cast<const Piece*>(pieces[rank]) + i); };
    const auto sum_outer = [&](std::size_t begin, std::size_t end) HWY_ATTR {
      auto sum = hn::Zero(d);
      for (std::size_t group = begin; group < end; group += group_size) {
        const std::size_t last = end - group < group_size ? end : group + group_size;
        auto partial = piece(group);
        for (std::size_t rank = group + 1; rank < last; ++rank) partial = hn::Add(partial, piece(rank));
        // The first group's sum is taken unchanged, because 0 + -0 would lose the sign.
        sum = group == begin ? partial : hn::Add(sum, partial);
      }
      return sum;
    };
    auto total = sum_outer(0, first_end);
    if (!plain) {
      if (folds) total = hn::Add(load(d, out + i), total);  // the next outer groups are added to that
      for (std::size_t outer = first_end; outer < all; outer += outer_size) {
        total = hn::Add(total, sum_outer(outer, std::min(outer + outer_size, all)));
      }
    }
    if (accumulate && !folds) total = hn::Add(load(d, out + i), total);
    store(d, total, out + i);
  });
}

/// Writes vectors with non-temporal stores to an aligned address; two at a time for 16-bit elements.
template <class D, class Out>
HWY_INLINE void stream_out(D d, const hn::VFromD<D>* vectors, int number, Out* to) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (int v = 0; v < number; v += 2) store_pair(d, vectors[v], vectors[v + 1], to + v * lanes, true);
}
template <class D>
HWY_INLINE void stream_out(D d, const hn::VFromD<D>* vectors, int number, float* to) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (int v = 0; v < number; ++v) hn::Stream(vectors[v], d, to + v * lanes);
}

/// The same sums for operands that are read from memory and a result that is written to memory, one cache
/// line of every operand at a time. These are many read streams, often in 4 KiB pages, at whose ends a
/// processor's own prefetching stops: so each is prefetched `ahead` bytes before it is read. `flat` is the
/// number of operands if they form one group, or 0 for any number of operands and groups.
template <std::size_t flat, class Piece, class Out>
HWY_INLINE void ordered_sum_streaming(std::span<const void* const> pieces, std::size_t group_size,
                                      bool accumulate, Out* out, std::int64_t first, std::int64_t count) {
  using D = hn::ScalableTag<float>;
  const D d;
  constexpr std::int64_t line = 64;
  const std::int64_t ahead = sum_prefetch_bytes(pieces.size());
  constexpr int vectors =
      std::max<int>(sizeof(Out) == 2 ? 2 : 1, line / static_cast<int>(sizeof(Piece) * hn::MaxLanes(D())));
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d)), block = vectors * lanes;
  const auto width = static_cast<std::int64_t>(sizeof(Out));
  const std::int64_t whole = std::max(line, lanes * 4);
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(out + first));
  const std::int64_t head = std::min(count, (whole - address % whole) % whole / width);
  ordered_sum_loop<Piece>(pieces, group_size, pieces.size(), accumulate, out, first, head);
  std::int64_t i = first + head;
  const std::int64_t end = first + count;
  for (; i + block <= end; i += block) {
    hn::VFromD<D> total[vectors], partial[vectors];
    const auto piece = [&](std::size_t rank) HWY_ATTR {
      const Piece* from = static_cast<const Piece*>(pieces[rank]) + i;
      hwy::Prefetch(reinterpret_cast<const char*>(from) + ahead);
      return from;
    };
    const auto sum_group = [&](std::size_t rank, std::size_t last, auto& sums) HWY_ATTR {
      const Piece* from = piece(rank);
      for (int v = 0; v < vectors; ++v) sums[v] = load(d, from + v * lanes);
      while (++rank < last) {
        from = piece(rank);
        for (int v = 0; v < vectors; ++v) sums[v] = hn::Add(sums[v], load(d, from + v * lanes));
      }
    };
    if constexpr (flat > 0) {
      sum_group(0, flat, total);
    } else {
      sum_group(0, std::min(group_size, pieces.size()), total);
      for (std::size_t group = group_size; group < pieces.size(); group += group_size) {
        sum_group(group, std::min(group + group_size, pieces.size()), partial);
        for (int v = 0; v < vectors; ++v) total[v] = hn::Add(total[v], partial[v]);
      }
    }
    for (int v = 0; accumulate && v < vectors; ++v)
      total[v] = hn::Add(load(d, out + i + v * lanes), total[v]);
    stream_out(d, total, vectors, out + i);
  }
  hwy::FlushStream();
  ordered_sum_loop<Piece>(pieces, group_size, pieces.size(), accumulate, out, i, end - i);
}

/// The usual numbers of ranks on a node have specialised loops if the result is fp32.
template <class Piece, class Out>
HWY_INLINE void ordered_sum_to_memory(std::span<const void* const> pieces, std::size_t group_size,
                                      bool accumulate, Out* out, std::int64_t first, std::int64_t count) {
  if constexpr (sizeof(Out) == 4) {
    if (group_size >= pieces.size()) {
      switch (pieces.size()) {
        case 1:
          return ordered_sum_streaming<1, Piece>(pieces, group_size, accumulate, out, first, count);
        case 2:
          return ordered_sum_streaming<2, Piece>(pieces, group_size, accumulate, out, first, count);
        case 4:
          return ordered_sum_streaming<4, Piece>(pieces, group_size, accumulate, out, first, count);
        case 8:
          return ordered_sum_streaming<8, Piece>(pieces, group_size, accumulate, out, first, count);
        default:
          break;
      }
    }
  }
  ordered_sum_streaming<0, Piece>(pieces, group_size, accumulate, out, first, count);
}

void sum_pieces(std::span<const void* const> pieces, DataType piece_dtype, SumGroups groups, bool accumulate,
                const TensorView& out, SumTarget target, std::int64_t first, std::int64_t count) {
  with_floating(piece_dtype, [&](auto piece) HWY_ATTR {
    with_floating(out.dtype, [&](auto result) HWY_ATTR {
      using Piece = decltype(piece);
      auto* to = static_cast<decltype(result)*>(out.data);
      // A fold of one group, or without accumulation, is an ordinary sum.
      auto group = static_cast<std::size_t>(std::max(std::abs(groups.size), 1));
      const bool folds = groups.size <= 0 && accumulate && pieces.size() > group;
      // Without a fold, outer groups of one group have the bits of a single outer group.
      const std::size_t outer =
          groups.outer > 1 || folds ? group * static_cast<std::size_t>(groups.outer) : pieces.size();
      if (groups.size == 0 && outer >= pieces.size()) group = pieces.size();
      if (target == SumTarget::memory && !folds && outer >= pieces.size()) {
        ordered_sum_to_memory<Piece>(pieces, group, accumulate, to, first, count);
      } else {
        ordered_sum_loop<Piece>(pieces, group, outer, accumulate, to, first, count, folds);
      }
    });
  });
}

void round_and_sum(const ConstTensorView& source, DataType communication, bool accumulate,
                   const TensorView& out, std::int64_t first, std::int64_t count) {
  const void* const pieces[] = {source.data};
  with_floating(out.dtype, [&](auto result) HWY_ATTR {
    auto* to = static_cast<decltype(result)*>(out.data);
    switch (communication) {
      case DataType::bfloat16:
        return ordered_sum_to_memory<Rounded<bfloat16>>(pieces, 1, accumulate, to, first, count);
      case DataType::float16:
        return ordered_sum_to_memory<Rounded<float16>>(pieces, 1, accumulate, to, first, count);
      default:
        return ordered_sum_to_memory<float>(pieces, 1, accumulate, to, first, count);
    }
  });
}

/// Adds a block's squares and returns true, unless an element is not finite.
bool add_block_squares(const ConstTensorView& of, std::int64_t first, std::int64_t count,
                       RunningSquares& squares) {
  bool finite = true;
  with_floating(of.dtype, [&](auto value) HWY_ATTR {
    finite = add_squares(static_cast<const decltype(value)*>(of.data) + first, count, squares);
  });
  return finite;
}

void empty_lanes_of(RunningSquares& squares) {
  empty_lanes(squares);
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(sum_pieces);
HWY_EXPORT(round_and_sum);
HWY_EXPORT(add_block_squares);
HWY_EXPORT(empty_lanes_of);

namespace {

template <class F>
void with_floating_pointer(const ConstTensorView& view, const F& f) {
  switch (view.dtype) {
    case DataType::bfloat16:
      return f(static_cast<const bfloat16*>(view.data));
    case DataType::float16:
      return f(static_cast<const float16*>(view.data));
    default:
      return f(static_cast<const float*>(view.data));
  }
}

/// The lowest index of an infinity or NaN in [first, first + count), -1 if none.
std::int64_t find_non_finite(const ConstTensorView& view, std::int64_t first, std::int64_t count) {
  std::int64_t found = -1;
  with_floating_pointer(view, [&](const auto* values) {
    for (std::int64_t i = first; i < first + count && found < 0; ++i) {
      if ((std::bit_cast<std::uint32_t>(to_float(values[i])) & 0x7fffffffu) >= 0x7f800000u) found = i;
    }
  });
  return found;
}

}  // namespace

void add_squares(const ConstTensorView& values, RunningSquares& squares) {
  if (!HWY_DYNAMIC_DISPATCH(add_block_squares)(values, 0, values.elements(), squares)) {
    squares.sum.add_infinity();
  }
}

const SquareSum& sum_of(RunningSquares& squares) {
  HWY_DYNAMIC_DISPATCH(empty_lanes_of)(squares);
  return squares.sum;
}

void ordered_sum(int threads, std::span<const void* const> pieces, DataType piece_dtype, SumGroups groups,
                 bool accumulate, const TensorView& out, SumTarget target) {
  parallel_ranges(threads, out.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(sum_pieces)
    (pieces, piece_dtype, groups, accumulate, out, target, first, count);
  });
}

void rounded_sum(int threads, const ConstTensorView& source, DataType communication, bool accumulate,
                 const TensorView& out) {
  parallel_ranges(threads, out.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(round_and_sum)(source, communication, accumulate, out, first, count);
  });
}

void gradient_statistics(int threads, const ConstTensorView& gradient, GradientStatistics* statistics) {
  constexpr std::int64_t block_elements = RunningSquares::most_elements;
  constexpr std::int64_t grain = parallel_grain / block_elements;
  constexpr std::int64_t blocks_between_carries = 65536;
  const std::int64_t elements = gradient.elements();
  GradientStatistics result;
  std::mutex mutex;
  parallel_ranges(
      threads, divide_round_up(elements, block_elements), grain,
      [&](std::int64_t first, std::int64_t number) {
        RunningSquares squares;
        std::int64_t non_finite = -1;
        for (std::int64_t block = first; block < first + number; ++block) {
          const std::int64_t start = block * block_elements;
          const std::int64_t count = std::min(block_elements, elements - start);
          if (!HWY_DYNAMIC_DISPATCH(add_block_squares)(gradient, start, count, squares) && non_finite < 0) {
            non_finite = find_non_finite(gradient, start, count);
          }
          // A block makes at most some 260 additions, and 2^30 may pass between two carries.
          if ((block - first) % blocks_between_carries == blocks_between_carries - 1) squares.sum.normalize();
        }
        const std::lock_guard lock(mutex);  // the sum is exact: any order gives the same
        result.squares += sum_of(squares);
        if (non_finite >= 0 && (result.first_non_finite < 0 || non_finite < result.first_non_finite))
          result.first_non_finite = non_finite;
      });
  *statistics = result;
}

void add_digest(int threads, const ConstTensorView& values, std::uint64_t tensor, std::int64_t first_element,
                Digest* digest) {
  const Digest origin = digest_origin(tensor);
  std::atomic<std::uint64_t> lanes[2] = {0, 0};  // wrapping sums: any order gives the same
  with_floating_pointer(values, [&](const auto* data) {
    parallel_ranges(threads, values.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
      Digest sum;
      for (std::int64_t i = first; i < first + count; ++i) {
        sum += digest_of(origin, static_cast<std::uint64_t>(first_element + i), to_float(data[i]));
      }
      lanes[0] += sum.lanes[0];
      lanes[1] += sum.lanes[1];
    });
  });
  *digest += Digest{{lanes[0], lanes[1]}};
}

}  // namespace tranche::kernels::cpu
#endif
