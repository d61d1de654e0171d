#pragma once
// The segments of an update as kernel parameters, from which each thread block finds its part.

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/exact_squares.h"
#include "kernels/cuda/master_elements.h"
#include "kernels/cuda/vector_loop.h"
#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::cuda {

inline constexpr int update_width = 4;   // 16 bytes of fp32 state, 8 of 16-bit data
inline constexpr int update_unroll = 2;  // 112 bytes of loads in flight per thread
inline constexpr int update_warps = vector_loop_threads / warp_size;  // each processes a block of 8-bit state

/// A segment and the thread blocks that compute it: from the previous segment's end_block up to `end_block`.
struct UpdatePart {
  std::int64_t first, elements;
  unsigned end_block;
  std::uint16_t group;
  std::uint8_t width, head;  ///< as in VectorRange
  std::uint64_t tensor;      ///< as in UpdateSegment
  std::int64_t origin;       ///< the tensor's element at element 0 of the range

  __device__ __forceinline__ RoundingDraws draws(const RoundingKey* key) const {
    if (key == nullptr) return {};
    return {detail::rounding_stream(key->seed, key->step, tensor), origin};
  }
};
/// A segment of a rule with a trust ratio.
struct TrustPart : UpdatePart {
  union {
    SquareSum* partial;
    const double* sums;
  };
};
/// Holds as many segments as fit in the 4 KiB of a kernel's parameters beside its operands.
template <class Part>
struct UpdateParts {
  static constexpr int most = 3072 / static_cast<int>(sizeof(Part));
  Part list[most];
  int count;
};

/// The segment of a thread block, and the block's index within it.
template <class Part>
struct PartOfBlock {
  const Part& part;
  unsigned block, blocks;
};
template <class Part>
__device__ __forceinline__ PartOfBlock<Part> part_of_block(const UpdateParts<Part>& parts) {
  int lower = 0, upper = parts.count - 1;
  while (lower < upper) {
    const int middle = (lower + upper) / 2;
    if (blockIdx.x < parts.list[middle].end_block) {
      upper = middle;
    } else {
      lower = middle + 1;
    }
  }
  const unsigned begin_block = lower == 0 ? 0 : parts.list[lower - 1].end_block;
  return {parts.list[lower], blockIdx.x - begin_block, parts.list[lower].end_block - begin_block};
}

/// Makes one launch for each UpdateParts::most segments that are not empty.
template <class Part, class Launch>
void launch_parts(const RuleOperands& of, RulePhase phase, const Launch& launch_table) {
  const bool in_blocks = !of.state.empty() && is_block(of.state[0].dtype);
  const auto demand_of_view = [&](const ConstTensorView& view) {
    return view.data == nullptr || in_blocks ? Demand{}
                                             : demand_of(view.data, size_of(view.dtype), update_width);
  };
  Demand demands[3 + most_rule_states] = {demand_of_view(of.gradient), demand_of_view(of.master),
                                          demand_of_view(of.weight)};
  for (std::size_t i = 0; i < of.state.size(); ++i) demands[3 + i] = demand_of_view(of.state[i]);
  UpdateParts<Part> parts{};
  unsigned blocks = 0;
  const auto flush = [&] {
    if (parts.count > 0) launch_table(parts, blocks);
    parts.count = 0;
    blocks = 0;
  };
  for (const UpdateSegment& segment : of.segments) {
    if (segment.count == 0) continue;
    const auto from = [&](const Demand& demand) {
      return Demand{demand.offset + static_cast<std::uint64_t>(segment.first * demand.step), demand.step,
                    demand.modulus};
    };
    const VectorRange range =
        vector_range(segment.count, update_width,
                     {from(demands[0]), from(demands[1]), from(demands[2]), from(demands[3]),
                      from(demands[4]), from(demands[5]), from(demands[6])});
    constexpr std::int64_t in_warps = update_warps * block8_elements;
    blocks += phase == RulePhase::advance ? grid_blocks(segment.count, square_block, multiprocessors(), 4)
              : in_blocks                 ? grid_blocks(segment.count, in_warps, multiprocessors(), 4)
                                          : vector_loop_shape(range, update_unroll).grid.x;
    Part part{};
    part.first = segment.first;
    part.elements = segment.count;
    part.end_block = blocks;
    part.group = static_cast<std::uint16_t>(segment.group);
    part.width = static_cast<std::uint8_t>(range.width);
    part.head = static_cast<std::uint8_t>(range.head);
    part.tensor = segment.tensor;
    part.origin = segment.first_element - segment.first;
    if constexpr (std::is_same_v<Part, TrustPart>) {
      if (phase == RulePhase::advance) {
        part.partial = segment.partial;
      } else {
        part.sums = segment.sums;
      }
    }
    parts.list[parts.count++] = part;
    if (parts.count == UpdateParts<Part>::most) flush();
  }
  flush();
}

}  // namespace tranche::kernels::cuda
