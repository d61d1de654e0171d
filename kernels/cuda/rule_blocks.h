#pragma once
// The update of elements whose states are in blocks of 8 bits (rule_update.h). A warp processes a block at a
// time.

#include <type_traits>

#include "kernels/cuda/block8_states.h"
#include "kernels/cuda/rule_elements.h"

namespace tranche::kernels::cuda {

/// RuleOperation with states in blocks.
template <class Rule, unsigned kept>
struct BlockOperation {
  using Scalar = RuleOperation<Rule, kept, float>;
  static constexpr bool trust = Scalar::trust, states_first = Scalar::states_first;
  static constexpr int states = Scalar::states;

  AnyElements gradient;
  MasterElements master;
  Block8State state[states];
  const RoundingKey* rounding_key;

  __device__ __forceinline__ void load_states(std::int64_t first,
                                              float (&values)[states][block8_each]) const {
#pragma unroll
    for (int slot = 0; slot < states; ++slot) {
      if ((kept >> slot & 1) != 0) state[slot].load(first, values[slot]);
    }
  }
  __device__ __forceinline__ void store_states(std::int64_t first, int count,
                                               float (&values)[states][block8_each]) const {
#pragma unroll
    for (int slot = 0; slot < states; ++slot) {
      if ((kept >> slot & 1) != 0) state[slot].store(first, count, values[slot]);
    }
  }
  /// Calls call(i, s) for the lane's elements with their states, and keeps the resulting states.
  template <class Call>
  __device__ __forceinline__ static void for_elements(int count, float (&values)[states][block8_each],
                                                      const Call& call) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
    for (int k = 0; k < block8_each; ++k) {
      if (warp_size * k + lane >= count) continue;
      float s[states];
#pragma unroll
      for (int slot = 0; slot < states; ++slot) s[slot] = values[slot][k];
      call(k, warp_size * k + lane, s);
#pragma unroll
      for (int slot = 0; slot < states; ++slot) values[slot][k] = s[slot];
    }
  }
  __device__ __forceinline__ float gradient_at(std::int64_t i) const {
    float g[1] = {};
    AnyElements::widen<1>(gradient.load<1>(i), g);
    return g[0];
  }
  __device__ __forceinline__ float master_at(std::int64_t i) const {
    float w[1];
    MasterElements::widen<1>(master.load<1>(i), w);
    return w[0];
  }
};

template <class Rule, unsigned kept, class Operation, class Part>
__global__ void __launch_bounds__(vector_loop_threads)
    update_blocks_kernel(const Operation of, const unsigned char* arguments, const std::int64_t stride,
                         const UpdateParts<Part> parts) {
  const PartOfBlock<Part> place = part_of_block(parts);
  const Part& part = place.part;
  const auto a = *reinterpret_cast<const typename Rule::Arguments*>(arguments + part.group * stride);
  if (!a.apply) return;
  const RoundingDraws draws = part.draws(of.rounding_key);
  float ratio = 1;
  if constexpr (Operation::trust) ratio = Rule::ratio(a, sqrt(part.sums[0]), sqrt(part.sums[1]));
  const std::int64_t step = std::int64_t{place.blocks} * update_warps * block8_elements;
  const std::int64_t warp = std::int64_t{place.block} * update_warps + threadIdx.x / warp_size;
  for (std::int64_t at = warp * block8_elements; at < part.elements; at += step) {
    const std::int64_t first = part.first + at;
    const auto count = static_cast<int>(
        min(static_cast<long long>(block8_elements), static_cast<long long>(part.elements - at)));
    float values[Operation::states][block8_each] = {};
    of.load_states(first, values);
    Operation::for_elements(count, values, [&](int, int i, float(&s)[Operation::states]) {
      float g = 0, w[1] = {of.master_at(first + i)};
      if constexpr (!Operation::states_first) g = of.gradient_at(first + i);
      if constexpr (Operation::trust) {
        const float direction = Rule::template direction<kept>(a, g, w[0], s);
        Rule::template finish<kept>(a, ratio, direction, w[0], s);
      } else {
        Rule::template element<kept>(a, g, w[0], s);
      }
      of.master.template store<1>(first + i, w, draws);
    });
    if constexpr (!Operation::states_first) of.store_states(first, count, values);
  }
}

/// advance_kernel for states in blocks: a warp has two blocks of the 4096 numbers that are added together.
template <class Rule, unsigned kept, class Operation>
__global__ void __launch_bounds__(square_threads)
    advance_blocks_kernel(const Operation of, const unsigned char* arguments, const std::int64_t stride,
                          const UpdateParts<TrustPart> parts) {
  __shared__ ExactSquares shared[2];
  const PartOfBlock<TrustPart> place = part_of_block(parts);
  const TrustPart& part = place.part;
  const auto a = *reinterpret_cast<const typename Rule::Arguments*>(arguments + part.group * stride);
  if (!a.apply) return;
  for (ExactSquares& squares : shared) squares.clear();
  const std::int64_t chunks = (part.elements + square_block - 1) / square_block;
  for (std::int64_t chunk = place.block; chunk < chunks; chunk += place.blocks) {
    float weights[squares_each] = {}, directions[squares_each] = {};
#pragma unroll
    for (int half = 0; half < squares_each / block8_each; ++half) {
      const std::int64_t at =
          chunk * square_block + (half * ExactSquares::warps + threadIdx.x / warp_size) * block8_elements;
      if (at >= part.elements) continue;  // for the whole warp
      const std::int64_t first = part.first + at;
      const auto count = static_cast<int>(
          min(static_cast<long long>(block8_elements), static_cast<long long>(part.elements - at)));
      float values[Operation::states][block8_each] = {};
      of.load_states(first, values);
      if constexpr (Rule::states_first) {
        Operation::for_elements(count, values, [&](int, int i, float(&s)[Operation::states]) {
          Rule::template advance<kept>(a, of.gradient_at(first + i), of.master_at(first + i), s);
        });
        of.store_states(first, count, values);  // in their stored format, as the other phase reads them
      }
      Operation::for_elements(count, values, [&](int k, int i, float(&s)[Operation::states]) {
        const float g = Rule::states_first ? 0.0f : of.gradient_at(first + i);
        const float w = of.master_at(first + i);
        weights[half * block8_each + k] = w;
        directions[half * block8_each + k] = Rule::template direction<kept>(a, g, w, s);
      });
    }
    shared[0].add(weights);
    shared[1].add(directions);
  }
  for (int i = 0; i < 2; ++i) shared[i].finish(part.partial[i]);
}

template <class Rule, unsigned kept>
void launch_blocks(Stream& stream, RulePhase phase, const RuleOperands& of) {
  using Operation = BlockOperation<Rule, kept>;
  Operation operation{};
  operation.gradient = any_elements_of(of.gradient);
  operation.master = master_elements_of(of.master, of.weight, of.rounding);
  operation.rounding_key = of.rounding_key;
  std::size_t next = 0;
  for (int slot = 0; slot < Operation::states; ++slot) {
    if ((kept >> slot & 1) != 0) operation.state[slot] = block8_state_of(of.state[next++]);
  }
  const auto* const arguments = reinterpret_cast<const unsigned char*>(of.arguments);
  const char* const name = Rule::kernel.data();
  using Part = std::conditional_t<Operation::trust, TrustPart, UpdatePart>;
  launch_parts<Part>(of, phase, [&](const UpdateParts<Part>& parts, unsigned blocks) {
    if constexpr (Operation::trust) {
      if (phase == RulePhase::advance) {
        launch(stream, name, advance_blocks_kernel<Rule, kept, Operation>,
               {.grid = blocks, .block = square_threads}, operation, arguments, of.stride, parts);
        return;
      }
    }
    launch(stream, name, update_blocks_kernel<Rule, kept, Operation, Part>,
           {.grid = blocks, .block = vector_loop_threads}, operation, arguments, of.stride, parts);
  });
}

}  // namespace tranche::kernels::cuda
