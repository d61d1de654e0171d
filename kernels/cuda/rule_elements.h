#pragma once
// The update of elements whose states are fp32 or 16-bit (rule_update.h).

#include <iterator>
#include <type_traits>

#include "kernels/cuda/elements.h"
#include "kernels/cuda/update_parts.h"

namespace tranche::kernels::cuda {

/// RulePhase::update (a rule without a trust ratio) or finish (one with), as an operation of vector_loop.h.
template <class Rule, unsigned kept, class State>
struct RuleOperation {
  static constexpr bool trust = requires { Rule::states_first; };
  static constexpr bool states_first = [] {
    if constexpr (trust) {
      return Rule::states_first;
    } else {
      return false;
    }
  }();
  static constexpr int states = static_cast<int>(std::size(Rule::states));
  using StateElements = Elements<State>;

  template <int n>
  struct Loaded {
    typename AnyElements::template Loaded<n> gradient;
    typename MasterElements::template Loaded<n> master;
    typename Elements<State>::template Loaded<n> state[states];
  };
  AnyElements gradient;
  MasterElements master;
  Elements<State> state[states];
  const RoundingKey* rounding_key;
  RoundingDraws draws;
  typename Rule::Arguments arguments;
  float ratio;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    Loaded<n> loaded{};
    if constexpr (!states_first) loaded.gradient = gradient.load<n>(i);
    loaded.master = master.load<n>(i);
#pragma unroll
    for (int slot = 0; slot < states; ++slot) {
      if ((kept >> slot & 1) != 0) loaded.state[slot] = state[slot].template load<n>(i);
    }
    return loaded;
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float g[n] = {}, w[n], values[states][n] = {};
    if constexpr (!states_first) AnyElements::widen<n>(loaded.gradient, g);
    MasterElements::widen<n>(loaded.master, w);
#pragma unroll
    for (int slot = 0; slot < states; ++slot) {
      if ((kept >> slot & 1) != 0) Elements<State>::template widen<n>(loaded.state[slot], values[slot]);
    }
#pragma unroll
    for (int k = 0; k < n; ++k) {
      float s[states];
#pragma unroll
      for (int slot = 0; slot < states; ++slot) s[slot] = values[slot][k];
      if constexpr (trust) {
        const float direction = Rule::template direction<kept>(arguments, g[k], w[k], s);
        Rule::template finish<kept>(arguments, ratio, direction, w[k], s);
      } else {
        Rule::template element<kept>(arguments, g[k], w[k], s);
      }
#pragma unroll
      for (int slot = 0; slot < states; ++slot) values[slot][k] = s[slot];
    }
    master.store<n>(i, w, draws);
#pragma unroll
    for (int slot = 0; slot < states; ++slot) {
      if (!states_first && (kept >> slot & 1) != 0) state[slot].template store<n>(i, values[slot]);
    }
  }
};

/// Applies an operation to the elements from `first` on.
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

/// Two blocks per multiprocessor, that is 128 registers per thread: by itself ptxas uses 64 or 80 for some
/// rules and spills around the call that rounds weights. Two blocks have 57 KB of loads in flight, enough to
/// hide memory's latency.
inline constexpr int resident_update_blocks = 2;

template <class Rule, class Operation, class Part>
__global__ void __launch_bounds__(vector_loop_threads, resident_update_blocks)
    update_kernel(Operation operation, const unsigned char* arguments, const std::int64_t stride,
                  const UpdateParts<Part> parts) {
  const PartOfBlock<Part> place = part_of_block(parts);
  const Part& part = place.part;
  operation.arguments = *reinterpret_cast<const typename Rule::Arguments*>(arguments + part.group * stride);
  if (!operation.arguments.apply) return;
  operation.draws = part.draws(operation.rounding_key);
  if constexpr (Operation::trust) {
    operation.ratio = Rule::ratio(operation.arguments, sqrt(part.sums[0]), sqrt(part.sums[1]));
  }
  const VectorRange range{part.elements, (part.elements - part.head) / part.width, part.width, part.head};
  const From<Operation> from{operation, part.first};
  if (part.width == update_width) {
    for_vector_range<update_width, update_unroll>(from, range, place.block, place.blocks);
  } else {
    for_vector_range<1, update_unroll>(from, range, place.block, place.blocks);
  }
}

/// RulePhase::advance computes new states, and the squares of weights and directions.
template <class Rule, unsigned kept, class Operation>
__global__ void __launch_bounds__(square_threads, resident_update_blocks)
    advance_kernel(const Operation of, const unsigned char* arguments, const std::int64_t stride,
                   const UpdateParts<TrustPart> parts) {
  constexpr int states = Operation::states;
  __shared__ ExactSquares shared[2];
  const PartOfBlock<TrustPart> place = part_of_block(parts);
  const TrustPart& part = place.part;
  const auto a = *reinterpret_cast<const typename Rule::Arguments*>(arguments + part.group * stride);
  if (!a.apply) return;
  for (ExactSquares& squares : shared) squares.clear();
  const std::int64_t chunks = (part.elements + square_block - 1) / square_block;
  for (std::int64_t chunk = place.block; chunk < chunks; chunk += place.blocks) {
    float weights[squares_each], directions[squares_each];
#pragma unroll
    for (int k = 0; k < squares_each; ++k) {
      const std::int64_t at = chunk * square_block + k * square_threads + static_cast<int>(threadIdx.x);
      weights[k] = directions[k] = 0;
      if (at >= part.elements) continue;
      const std::int64_t i = part.first + at;
      float g[1], w[1], s[states] = {};
      AnyElements::widen<1>(of.gradient.template load<1>(i), g);
      MasterElements::widen<1>(of.master.template load<1>(i), w);
#pragma unroll
      for (int slot = 0; slot < states; ++slot) {
        float value[1];
        if ((kept >> slot & 1) == 0) continue;
        Operation::StateElements::template widen<1>(of.state[slot].template load<1>(i), value);
        s[slot] = value[0];
      }
      if constexpr (Rule::states_first) {
        Rule::template advance<kept>(a, g[0], w[0], s);
#pragma unroll
        for (int slot = 0; slot < states; ++slot) {
          float value[1] = {s[slot]};
          if ((kept >> slot & 1) == 0) continue;
          of.state[slot].template store<1>(i, value);
          // The value in its stored format, as the other phase reads it.
          Operation::StateElements::template widen<1>(of.state[slot].template load<1>(i), value);
          s[slot] = value[0];
        }
        g[0] = 0;
      }
      weights[k] = w[0];
      directions[k] = Rule::template direction<kept>(a, g[0], w[0], s);
    }
    shared[0].add(weights);
    shared[1].add(directions);
  }
  for (int i = 0; i < 2; ++i) shared[i].finish(part.partial[i]);
}

template <class Rule, unsigned kept, class State>
void launch_typed(Stream& stream, RulePhase phase, const RuleOperands& of) {
  using Operation = RuleOperation<Rule, kept, State>;
  Operation operation{};
  operation.gradient = any_elements_of(of.gradient);
  operation.master = master_elements_of(of.master, of.weight, of.rounding);
  operation.rounding_key = of.rounding_key;
  std::size_t next = 0;
  for (int slot = 0; slot < Operation::states; ++slot) {
    if ((kept >> slot & 1) != 0) operation.state[slot] = elements_of<State>(of.state[next++]);
  }
  const auto* const arguments = reinterpret_cast<const unsigned char*>(of.arguments);
  const char* const name = Rule::kernel.data();
  using Part = std::conditional_t<Operation::trust, TrustPart, UpdatePart>;
  launch_parts<Part>(of, phase, [&](const UpdateParts<Part>& parts, unsigned blocks) {
    if constexpr (Operation::trust) {
      if (phase == RulePhase::advance) {
        launch(stream, name, advance_kernel<Rule, kept, Operation>, {.grid = blocks, .block = square_threads},
               operation, arguments, of.stride, parts);
        return;
      }
    }
    launch(stream, name, update_kernel<Rule, Operation, Part>, {.grid = blocks, .block = vector_loop_threads},
           operation, arguments, of.stride, parts);
  });
}

}  // namespace tranche::kernels::cuda
