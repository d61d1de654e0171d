#pragma once
/// The arithmetic of an optimizer's pass without its memory traffic: the other floor that the pass is held
/// against.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tranche/core/dtype.h"

namespace tranche::bench {

/// For each thread a block of its own that stays in the core's second-level cache (at most 30 bytes times
/// 8192 elements), updated by the library's kernels again and again; weights in bf16, moments in fp32.
class ResidentUpdate {
 public:
  /// `rule`: adamw, adam or sgd (with momentum).
  ResidentUpdate(const std::string& rule, DataType gradient, int threads);
  ~ResidentUpdate();
  /// Updates as many blocks as `elements` fill, an equal number on each thread. Returns the elements that all
  /// threads together updated.
  std::int64_t pass(std::int64_t elements);

  static constexpr std::int64_t block_elements = 8192;

 private:
  struct Block;
  std::string rule_;
  DataType gradient_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

}  // namespace tranche::bench
