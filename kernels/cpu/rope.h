#pragma once
#include <cstdint>
#include <vector>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

/// Checked operands of kernels::rope_table.
struct RopeTable {
  std::vector<float> frequencies;
  const std::int32_t* positions = nullptr;  ///< null: first_position + row % time
  std::int64_t time = 0, first_position = 0, rows = 0;
  float* table = nullptr;
  int threads = 1;
};
void rope_table(const RopeTable& call);

/// Checked operands of kernels::rope.
struct Rope {
  bool inverse = false;
  std::int64_t rows = 0, heads = 0, head_dim = 0, width = 0;
  DataType dtype = DataType::float32;
  const float* table = nullptr;
  void* x = nullptr;
  int threads = 1;
};
void rope(const Rope& call);

}  // namespace tranche::kernels::cpu
