#pragma once
#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

/// Checked operands of the calls in kernels/cross_entropy.h; each call uses only some members.
struct CrossEntropyCall {
  std::int64_t rows = 0, columns = 0, first_column = 0;
  const float* logits = nullptr;
  const std::int32_t* targets = nullptr;
  float* maximum = nullptr;
  float* sum = nullptr;
  float* target_logit = nullptr;
  float scale = 0;
  void* d_logits = nullptr;
  DataType gradient_dtype = DataType::float32;
  double* loss_sum = nullptr;
  std::int64_t* token_count = nullptr;
  std::int64_t ranks = 0;
  const float* states = nullptr;  ///< [ranks][3][rows]
  int threads = 1;
};

void cross_entropy_begin(const CrossEntropyCall& call);
void cross_entropy_accumulate(const CrossEntropyCall& call);
void cross_entropy_combine(const CrossEntropyCall& call);
void cross_entropy_finish(const CrossEntropyCall& call);
void cross_entropy_gradient(const CrossEntropyCall& call);

}  // namespace tranche::kernels::cpu
