#include "kernels/cpu/reduction.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <iterator>
#include <mutex>

#include "hwy/cache_control.h"
#include "kernels/cpu/parallel.h"
#include "kernels/digest_mix.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/reduction.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// An fp32 element that counts as what is left of it in another dtype.
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

template <class Piece, class Out>
HWY_INLINE void ordered_sum_loop(std::span<const void* const> pieces, std::size_t group_size, bool accumulate,
                                 Out* out, std::int64_t first, std::int64_t count) {
  for_each_vector(count, [&](auto d, std::int64_t offset) HWY_ATTR {
    const std::int64_t i = first + offset;
    const auto piece = [&](std::size_t rank)
                           HWY_ATTR { return load(d, static_cast<const Piece*>(pieces[rank]) + i); };
    auto total = hn::Zero(d);
    if (group_size == 0) {  // a fold, from what is there
      total = load(d, out + i);
      for (std::size_t rank = 0; rank < pieces.size(); ++rank) total = hn::Add(total, piece(rank));
      return store(d, total, out + i);
    }
    for (std::size_t group = 0; group < pieces.size(); group += group_size) {
      const std::size_t end = pieces.size() - group < group_size ? pieces.size() : group + group_size;
      auto partial = piece(group);
      for (std::size_t rank = group + 1; rank < end; ++rank) partial = hn::Add(partial, piece(rank));
      // The first group's sum is taken as it is: 0 + -0 would lose the sign.
      total = group == 0 ? partial : hn::Add(total, partial);
    }
    if (accumulate) total = hn::Add(load(d, out + i), total);
    store(d, total, out + i);
  });
}

/// Writes vectors with non-temporal stores, to an aligned address; two at a time where elements have 16 bits.
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

/// The same sums for operands that are read from memory and a result that goes there, a cache line of every
/// piece at a time. The pieces are as many streams of reads, often in 4 KiB pages, at whose ends a
/// processor's own prefetching stops: so each is prefetched `ahead` bytes before it is read. `flat`: so many
/// pieces in one group, or 0 for any number of either.
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
  ordered_sum_loop<Piece>(pieces, group_size, accumulate, out, first, head);
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
  ordered_sum_loop<Piece>(pieces, group_size, accumulate, out, i, end - i);
}

/// The usual numbers of ranks on a node have loops of their own where the result is fp32.
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

void sum_pieces(std::span<const void* const> pieces, DataType piece_dtype, int group_size, bool accumulate,
                const TensorView& out, SumTarget target, std::int64_t first, std::int64_t count) {
  with_floating(piece_dtype, [&](auto piece) HWY_ATTR {
    with_floating(out.dtype, [&](auto result) HWY_ATTR {
      using Piece = decltype(piece);
      auto* to = static_cast<decltype(result)*>(out.data);
      // A fold of one piece, or from nothing, is a sum like any other.
      const bool folds = group_size == 0 && accumulate && pieces.size() > 1;
      const auto group = folds ? 0 : group_size == 0 ? pieces.size() : static_cast<std::size_t>(group_size);
      if (target == SumTarget::memory && !folds) {
        ordered_sum_to_memory<Piece>(pieces, group, accumulate, to, first, count);
      } else {
        ordered_sum_loop<Piece>(pieces, group, accumulate, to, first, count);
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

/// The least and the greatest magnitude of a block, as bits of fp32; zeros count for neither.
struct MagnitudeRange {
  std::uint32_t least = 0xffffffffu, greatest = 0;
};

template <class T>
HWY_INLINE MagnitudeRange magnitude_range(const T* values, std::int64_t count) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> bits;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto least = hn::Set(bits, 0xffffffffu), greatest = hn::Zero(bits);
  const auto take = [&](const T* from) HWY_ATTR {
    const auto magnitude = hn::And(hn::BitCast(bits, load(d, from)), hn::Set(bits, 0x7fffffffu));
    greatest = hn::Max(greatest, magnitude);
    least = hn::Min(least, hn::Sub(magnitude, hn::Set(bits, 1)));  // zero becomes the greatest number
  };
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) take(values + i);
  if (i < count) {
    T last[hn::MaxLanes(d)] = {};
    std::copy(values + i, values + count, last);
    take(last);
  }
  return {hn::GetLane(hn::MinOfLanes(bits, least)) + 1, hn::GetLane(hn::MaxOfLanes(bits, greatest))};
}

/// The lanes take elements whose exponents are at most this much below the greatest. Each fp64 lane is two:
/// `upper` counts multiples of 2^unit in the mantissa of a number between 2^(unit + 52) and twice that, so
/// that adding a square rounds it to a multiple, and `lower` takes what the rounding left, of which the sum
/// is exact too. An element is below 2^(exponent - 126), its square below 2^(unit + 40), and the squares of
/// most_elements below 2^(unit + 52), even in one lane. What all upper lanes leave is at most 2^(unit + 11),
/// and a multiple of 2^(unit - 42).
constexpr int narrow_exponents = 17;

int unit_of(const RunningSquares& squares) {
  return 2 * squares.exponent - 292;
}
double begin_of(const RunningSquares& squares) {
  return std::ldexp(1.0, unit_of(squares) + 52);
}

template <class T>
HWY_INLINE void add_narrow_squares(const T* values, std::int64_t count, RunningSquares& squares) {
  const hn::CappedTag<double, 8> wide;
  const hn::Rebind<float, decltype(wide)> d;
  using Wide = hn::VFromD<decltype(wide)>;
  constexpr auto lanes = static_cast<std::int64_t>(hn::MaxLanes(wide));
  const auto at = [&](double* of, int k) HWY_ATTR { return hn::Load(wide, of + k * lanes); };
  auto upper0 = at(squares.upper, 0), upper1 = at(squares.upper, 1), upper2 = at(squares.upper, 2),
       upper3 = at(squares.upper, 3);
  auto lower0 = at(squares.lower, 0), lower1 = at(squares.lower, 1), lower2 = at(squares.lower, 2),
       lower3 = at(squares.lower, 3);
  const auto add = [&](const T* from, Wide& upper, Wide& lower) HWY_ATTR {
    const auto x = hn::PromoteTo(wide, load(d, from));
    const auto sum = hn::MulAdd(x, x, upper);  // fused or not: the square is exact
    lower = hn::Add(lower, hn::MulSub(x, x, hn::Sub(sum, upper)));
    upper = sum;
  };
  std::int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    // The next block is on its way from memory while this one, which is in the core's own cache, is worked
    // on.
    const char* const next = reinterpret_cast<const char*>(values + count + i);
    for (std::size_t line = 0; line < 4 * lanes * sizeof(T); line += 64) hwy::Prefetch(next + line);
    add(values + i, upper0, lower0);
    add(values + i + lanes, upper1, lower1);
    add(values + i + 2 * lanes, upper2, lower2);
    add(values + i + 3 * lanes, upper3, lower3);
  }
  squares.elements += count;
  for (; i < count; i += lanes) {
    T last[lanes] = {};
    std::copy(values + i, values + std::min(count, i + lanes), last);
    add(last, upper0, lower0);
  }
  const auto keep = [&](const Wide& upper, const Wide& lower, int k) HWY_ATTR {
    hn::Store(upper, wide, squares.upper + k * lanes);
    hn::Store(lower, wide, squares.lower + k * lanes);
  };
  keep(upper0, lower0, 0);
  keep(upper1, lower1, 1);
  keep(upper2, lower2, 2);
  keep(upper3, lower3, 3);
}

void empty_lanes(RunningSquares& squares) {
  if (squares.exponent == 0) return;
  const int unit = unit_of(squares);
  const auto begin = std::bit_cast<std::int64_t>(begin_of(squares));
  std::int64_t multiples = 0;
  double rest = 0;
  for (std::int64_t lane = 0; lane < 4 * std::int64_t{hn::MaxLanes(hn::CappedTag<double, 8>())}; ++lane) {
    multiples += std::bit_cast<std::int64_t>(squares.upper[lane]) - begin;
    rest += squares.lower[lane];
  }
  squares.sum.add(multiples, unit);
  squares.sum.add(rest);
  squares.exponent = 0;
}

void begin_lanes(int exponent, RunningSquares& squares) {
  squares.exponent = exponent;
  squares.elements = 0;
  std::fill(std::begin(squares.upper), std::end(squares.upper), begin_of(squares));
  std::fill(std::begin(squares.lower), std::end(squares.lower), 0.0);
}

/// The same for any finite elements: a sum of squares of mantissas for each exponent.
template <class T>
HWY_INLINE void add_wide_squares(const T* values, std::int64_t count, SquareSum& squares) {
  std::uint64_t by_exponent[256] = {};
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(to_float(values[i])) & 0x7fffffffu;
    const std::uint32_t exponent = bits >> 23;
    const std::uint64_t mantissa = exponent == 0 ? bits : ((bits & 0x7fffffu) | 0x800000u);
    by_exponent[std::max(exponent, 1u)] += mantissa * mantissa;
  }
  for (int exponent = 1; exponent < 255; ++exponent) {
    const std::uint64_t sum = by_exponent[exponent];
    if (sum != 0) squares.add(static_cast<std::int64_t>(sum), 2 * exponent - 300);
  }
}

/// Adds a block's squares, and returns true, unless an element is not finite.
bool add_block_squares(const ConstTensorView& of, std::int64_t first, std::int64_t count,
                       RunningSquares& squares) {
  bool finite = true;
  with_floating(of.dtype, [&](auto value) HWY_ATTR {
    const auto* values = static_cast<const decltype(value)*>(of.data) + first;
    const MagnitudeRange range = magnitude_range(values, count);
    finite = range.greatest < 0x7f800000u;
    if (!finite || range.greatest == 0) return;
    const auto exponent_of = [](std::uint32_t bits) { return std::max(static_cast<int>(bits >> 23), 1); };
    const int greatest = exponent_of(range.greatest), least = exponent_of(range.least);
    const auto fits = [&](int exponent) {
      return greatest <= exponent && exponent - least <= narrow_exponents;
    };
    if (!fits(squares.exponent) || squares.elements + count > RunningSquares::most_elements) {
      empty_lanes(squares);
      if (!fits(greatest)) return add_wide_squares(values, count, squares.sum);
      begin_lanes(fits(greatest + 1) ? greatest + 1 : greatest, squares);  // for blocks that come next
    }
    add_narrow_squares(values, count, squares);
  });
  return finite;
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(sum_pieces);
HWY_EXPORT(round_and_sum);
HWY_EXPORT(add_block_squares);
HWY_EXPORT(empty_lanes);

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

/// Lowest index of an infinity or NaN in [first, first + count), -1 if none.
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
  HWY_DYNAMIC_DISPATCH(empty_lanes)(squares);
  return squares.sum;
}

void ordered_sum(int threads, std::span<const void* const> pieces, DataType piece_dtype, int group_size,
                 bool accumulate, const TensorView& out, SumTarget target) {
  parallel_ranges(threads, out.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(sum_pieces)
    (pieces, piece_dtype, group_size, accumulate, out, target, first, count);
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
          // A block makes at most some 260 additions, of which 2^30 may pass between two carries.
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
