#pragma once
// Fused optimizer updates: one launch for a table of segments, which its parameters carry, one read of
// gradient and state, one write of state and weight.
// Compiled without contraction; a rule's file is the definition that the CPU's loops compute too, so the bits
// are the CPU's. Each rule's launches are a source of their own (kernels/rules/rule.cu.in).
//
// Bytes per element, Adam: gradient + 12 read, 12 + weight written (28 with 16-bit gradient and weight). Some
// 60 instructions an element, most of them IEEE's two divisions and square root, are a third of what the
// multiprocessors can issue in that time. A rule with a trust ratio takes two passes; the first adds squares
// as gradient_statistics does (exact_squares.h), in blocks of 4096 elements, and touches nothing 16 bytes at
// a time.

#include <array>
#include <vector>

#include "kernels/cuda/block8_states.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/exact_squares.h"
#include "kernels/cuda/vector_loop.h"
#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::cuda {

inline constexpr int update_width = 4;   // 16 bytes of the fp32 state, 8 of what is 16-bit
inline constexpr int update_unroll = 2;  // 112 bytes of loads in flight in a thread

/// A segment and the thread blocks that compute it: those from where the one before ends up to `end_block`.
struct UpdatePart {
  std::int64_t first, elements;
  unsigned end_block;
  std::uint16_t group;
  std::uint8_t width, head;  ///< as in VectorRange
};
/// A segment of a rule with a trust ratio.
struct TrustPart : UpdatePart {
  union {
    SquareSum* partial;
    const double* sums;
  };
};
/// As many as the 4 KiB of a kernel's parameters hold beside its operands.
template <class Part>
struct UpdateParts {
  static constexpr int most = 3072 / static_cast<int>(sizeof(Part));
  Part list[most];
  int count;
};

/// The segment of a thread block, and the block's place in it.
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

/// update (a rule without a trust ratio) or finish (one with) as an operation of vector_loop.h.
template <class Rule, unsigned kept, class Gradient, class State>
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
  using GradientElements = Elements<Gradient>;
  using StateElements = Elements<State>;

  template <int n>
  struct Loaded {
    typename Elements<Gradient>::template Loaded<n> gradient;
    typename Elements<float>::template Loaded<n> master;
    typename Elements<State>::template Loaded<n> state[states];
  };
  Elements<Gradient> gradient;
  Elements<float> master;
  Elements<State> state[states];
  AnyElements weight;
  typename Rule::Arguments arguments;
  float ratio;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    Loaded<n> loaded{};
    if constexpr (!states_first) loaded.gradient = gradient.template load<n>(i);
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
    if constexpr (!states_first) Elements<Gradient>::template widen<n>(loaded.gradient, g);
    Elements<float>::widen<n>(loaded.master, w);
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
    master.store<n>(i, w);
#pragma unroll
    for (int slot = 0; slot < states; ++slot) {
      if (!states_first && (kept >> slot & 1) != 0) state[slot].template store<n>(i, values[slot]);
    }
    if (weight.data != nullptr) weight.store<n>(i, w);
  }
};

/// An operation on the elements from `first` on.
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

template <class Rule, class Operation, class Part>
__global__ void __launch_bounds__(vector_loop_threads)
    update_kernel(Operation operation, const unsigned char* arguments, const std::int64_t stride,
                  const UpdateParts<Part> parts) {
  const PartOfBlock<Part> place = part_of_block(parts);
  const Part& part = place.part;
  operation.arguments = *reinterpret_cast<const typename Rule::Arguments*>(arguments + part.group * stride);
  if (!operation.arguments.apply) return;
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

/// The same with states in blocks; a warp takes a block at a time.
template <class Rule, unsigned kept, class Gradient>
struct BlockOperation {
  using Scalar = RuleOperation<Rule, kept, Gradient, float>;
  static constexpr bool trust = Scalar::trust, states_first = Scalar::states_first;
  static constexpr int states = Scalar::states;

  Elements<Gradient> gradient;
  Elements<float> master;
  Block8State state[states];
  AnyElements weight;

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
  /// Calls call(i, s) for the lane's elements with their states, and keeps what it makes of these.
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
    Elements<Gradient>::template widen<1>(gradient.template load<1>(i), g);
    return g[0];
  }
  __device__ __forceinline__ float master_at(std::int64_t i) const {
    float w[1];
    Elements<float>::widen<1>(master.load<1>(i), w);
    return w[0];
  }
};

inline constexpr int blocks_of_threads = vector_loop_threads / warp_size;

template <class Rule, unsigned kept, class Operation, class Part>
__global__ void __launch_bounds__(vector_loop_threads)
    update_blocks_kernel(const Operation of, const unsigned char* arguments, const std::int64_t stride,
                         const UpdateParts<Part> parts) {
  const PartOfBlock<Part> place = part_of_block(parts);
  const Part& part = place.part;
  const auto a = *reinterpret_cast<const typename Rule::Arguments*>(arguments + part.group * stride);
  if (!a.apply) return;
  float ratio = 1;
  if constexpr (Operation::trust) ratio = Rule::ratio(a, sqrt(part.sums[0]), sqrt(part.sums[1]));
  const std::int64_t step = std::int64_t{place.blocks} * blocks_of_threads * block8_elements;
  const std::int64_t warp = std::int64_t{place.block} * blocks_of_threads + threadIdx.x / warp_size;
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
      of.master.template store<1>(first + i, w);
      if (of.weight.data != nullptr) of.weight.template store<1>(first + i, w);
    });
    if constexpr (!Operation::states_first) of.store_states(first, count, values);
  }
}

/// advance_kernel with states in blocks: of the 4096 numbers that are added together a warp has two blocks.
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
      if (at >= part.elements) continue;  // of the whole warp
      const std::int64_t first = part.first + at;
      const auto count = static_cast<int>(
          min(static_cast<long long>(block8_elements), static_cast<long long>(part.elements - at)));
      float values[Operation::states][block8_each] = {};
      of.load_states(first, values);
      if constexpr (Rule::states_first) {
        Operation::for_elements(count, values, [&](int, int i, float(&s)[Operation::states]) {
          Rule::template advance<kept>(a, of.gradient_at(first + i), of.master_at(first + i), s);
        });
        of.store_states(first, count, values);  // and as the other phase finds them
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

/// RulePhase::advance: new states, and the squares of weights and directions.
template <class Rule, unsigned kept, class Operation>
__global__ void __launch_bounds__(square_threads)
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
      Operation::GradientElements::template widen<1>(of.gradient.template load<1>(i), g);
      Elements<float>::widen<1>(of.master.template load<1>(i), w);
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
          // As it is stored, and as the other phase finds it.
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

/// One launch for each UpdateParts::most segments that are not empty.
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
    constexpr std::int64_t in_warps = blocks_of_threads * block8_elements;
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

template <class Rule, unsigned kept, class Gradient, class State>
void launch_typed(Stream& stream, RulePhase phase, const RuleOperands& of) {
  using Operation = RuleOperation<Rule, kept, Gradient, State>;
  Operation operation{};
  operation.gradient = elements_of<Gradient>(of.gradient);
  operation.master = elements_of<float>(of.master);
  std::size_t next = 0;
  for (int slot = 0; slot < Operation::states; ++slot) {
    if ((kept >> slot & 1) != 0) operation.state[slot] = elements_of<State>(of.state[next++]);
  }
  operation.weight = any_elements_of(of.weight);
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

template <class Rule, unsigned kept, class Gradient>
void launch_blocks(Stream& stream, RulePhase phase, const RuleOperands& of) {
  using Operation = BlockOperation<Rule, kept, Gradient>;
  Operation operation{};
  operation.gradient = elements_of<Gradient>(of.gradient);
  operation.master = elements_of<float>(of.master);
  std::size_t next = 0;
  for (int slot = 0; slot < Operation::states; ++slot) {
    if ((kept >> slot & 1) != 0) operation.state[slot] = block8_state_of(of.state[next++]);
  }
  operation.weight = any_elements_of(of.weight);
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

template <class Rule>
void launch_rule_of(Stream& stream, RulePhase phase, const RuleOperands& of) {
  [&]<std::size_t... k>(std::index_sequence<k...>) {
    const auto with_slots = [&]<unsigned kept>(std::integral_constant<unsigned, kept>) {
      with_storage(of.gradient.dtype, [&](auto gradient) {
        if constexpr (kept != 0) {
          if (is_block(of.state[0].dtype)) {
            launch_blocks<Rule, kept, decltype(gradient)>(stream, phase, of);
            return;
          }
        }
        if (!of.state.empty() && of.state[0].dtype == DataType::bfloat16) {
          launch_typed<Rule, kept, decltype(gradient), bfloat16>(stream, phase, of);
        } else {
          launch_typed<Rule, kept, decltype(gradient), float>(stream, phase, of);
        }
      });
    };
    ((of.slots == Rule::slots[k] ? with_slots(std::integral_constant<unsigned, Rule::slots[k]>()) : void()),
     ...);
  }
  (std::make_index_sequence<std::size(Rule::slots)>());
}

}  // namespace tranche::kernels::cuda
