#include "bench/resident_update.h"

#include <algorithm>

#include "tests/kernels/cpu_updates.h"

namespace tranche::bench {

using kernels::AdamArguments;
using kernels::SgdArguments;
using kernels::UpdateSegment;

struct ResidentUpdate::Block {
  alignas(64) float gradient[block_elements], master[block_elements], first[block_elements],
      second[block_elements];
  alignas(64) bfloat16 weight[block_elements];
};

ResidentUpdate::ResidentUpdate(const std::string& rule, DataType gradient, int threads)
    : rule_(rule), gradient_(gradient) {
  for (int thread = 0; thread < threads; ++thread) {
    auto block = std::make_unique<Block>();
    for (std::int64_t i = 0; i < block_elements; ++i) {
      const float value = static_cast<float>(i % 1999) * 0x1p-17f - 0x1p-7f;
      if (gradient == DataType::float32) block->gradient[i] = value;
      if (gradient == DataType::bfloat16) {
        reinterpret_cast<bfloat16*>(block->gradient)[i] = to_bfloat16(value);
      }
      block->master[i] = 0.5f;
    }
    blocks_.push_back(std::move(block));
  }
}

ResidentUpdate::~ResidentUpdate() = default;

std::int64_t ResidentUpdate::pass(std::int64_t elements) {
  const auto threads = static_cast<int>(blocks_.size());
  const std::int64_t repeats = std::max<std::int64_t>(1, elements / (block_elements * threads));
  const AdamArguments adam{.learning_rate = 1e-4f,
                           .weight_decay = 0.1f,
                           .step_size = 2e-4f,
                           .corrected_epsilon = 1e-9f,
                           .gradient_scale = 0.5f,
                           .decoupled = rule_ == "adamw"};
  const SgdArguments sgd{
      .learning_rate = 1e-4f, .momentum = 0.9f, .weight_decay = 0.1f, .gradient_scale = 0.5f};
  const UpdateSegment whole{.first = 0, .count = block_elements, .group = 0};
  const Shape shape{block_elements};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread) {
    Block& block = *blocks_[static_cast<std::size_t>(thread)];
    const ConstTensorView gradient{block.gradient, gradient_, shape};
    const TensorView master{block.master, DataType::float32, shape};
    const TensorView first{block.first, DataType::float32, shape};
    const TensorView second{block.second, DataType::float32, shape};
    const TensorView weight{block.weight, DataType::bfloat16, shape};
    for (std::int64_t repeat = 0; repeat < repeats; ++repeat) {
      if (rule_ == "sgd") {
        kernels::cpu::sgd_update(1, {&sgd}, {&whole, 1}, gradient, master, first, weight);
      } else {
        kernels::cpu::adam_update(1, {&adam}, {&whole, 1}, gradient, master, first, second, weight);
      }
    }
  }
  return repeats * threads * block_elements;
}

}  // namespace tranche::bench
