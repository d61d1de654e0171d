#pragma once
/// The arithmetic of an optimizer's pass without its memory traffic: the second lower bound of the pass.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tranche/core/dtype.h"

namespace tranche::bench {

/// Each thread has a block that stays in the core's L2 cache (at most 30 bytes times 8192 elements), and
/// updates it repeatedly with the library's kernels. Weights are bf16, moments fp32.
class ResidentUpdate {
 public:
  /// `rule`: adamw, adam or sgd (with momentum).
  ResidentUpdate(const std::string& rule, DataType gradient, int threads);
  ~ResidentUpdate();
  /// Updates blocks of `elements` elements in total, as many on each thread. Returns the number of elements
  /// that all threads updated.
  std::int64_t pass(std::int64_t elements);

  static constexpr std::int64_t block_elements = 8192;

 private:
  struct Block;
  std::string rule_;
  DataType gradient_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

}  // namespace tranche::bench
