#pragma once
#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

/// The distance in tokens of prefetches of a table's rows: they lie anywhere, so the CPU cannot predict them.
inline constexpr std::int64_t embedding_rows_ahead = 2;

/// The tokens whose rows a table has, or all of them.
struct TokenRange {
  std::int64_t first = 0, count = -1;  ///< -1: all
  bool has(std::int64_t token) const { return count < 0 || (token >= first && token < first + count); }
};

/// Checked operands of kernels::embedding_forward.
struct EmbeddingForward {
  std::int64_t batch = 0, time = 0, width = 0;
  DataType dtype = DataType::float32;
  TokenRange range = {};
  const std::int32_t* tokens = nullptr;
  const void* token_table = nullptr;
  const void* position_table = nullptr;
  bool positions = true;                ///< false: no position_table
  const std::int32_t* given = nullptr;  ///< rows of position_table; null: the time
  void* out = nullptr;
  int threads = 1;
  bool streaming = false;  ///< set by embedding_forward()
};
void embedding_forward(const EmbeddingForward& call);

/// Checked operands of kernels::embedding_backward.
struct EmbeddingBackward {
  std::int64_t batch = 0, time = 0, width = 0;
  DataType dtype = DataType::float32;
  TokenRange range = {};
  const std::int32_t* tokens = nullptr;
  const void* d_out = nullptr;
  float* token_gradient = nullptr;
  float* position_gradient = nullptr;
  bool positions = true;
  int threads = 1;
};
void embedding_backward(const EmbeddingBackward& call);

}  // namespace tranche::kernels::cpu
