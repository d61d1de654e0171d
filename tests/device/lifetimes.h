#pragma once
/// Buffer lifetimes of training steps, for tests of packing.

#include <cstdint>
#include <vector>

#include "device/packing.h"

namespace tranche::testing_support {

struct StepShape {
  int blocks = 12;
  int micro_batches = 1;
  bool checkpointing = false;
  int depth = 0;            ///< units that are prefetched; 0: parameters are not gathered
  int wires_in_flight = 1;  ///< reductions whose communication buffers are still in use
  std::int64_t width = 768;
  std::int64_t tokens = 512;
  std::int64_t heads = 12;
  std::int64_t vocabulary = 50257;
};

/// The buffers of a GPT's step: embedding, blocks, head; forward and backward of each micro-batch. With
/// `depth` > 0 there are gather slots in both directions, gradient slots and communication buffers.
/// Activations have 16 bits.
std::vector<detail::PackingInterval> step_lifetimes(const StepShape& shape);

/// Intervals with log-uniform sizes and lifetimes, unlike those of a step.
std::vector<detail::PackingInterval> random_lifetimes(std::uint64_t seed, int count, std::int64_t span);

}  // namespace tranche::testing_support
