#pragma once
/// Memory traffic without arithmetic, of an optimizer's pass or of any mixture: the lower bound to which
/// kernels are compared.

#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::bench {

/// Buffers of `elements` elements each; `states` fp32 moments (0 to 2) are read and written in place, like
/// `master`. The weight is bf16, aligned to 64 bytes and written with non-temporal stores.
struct HostStreams {
  const void* gradient = nullptr;
  DataType gradient_type = DataType::bfloat16;
  float* master = nullptr;
  float* state[2] = {};
  int states = 2;
  bfloat16* weight = nullptr;
  std::int64_t elements = 0;

  /// For Adam with a 16-bit gradient 28: 2 + 3 * 8 + 2.
  std::int64_t bytes_per_element() const { return size_of(gradient_type) + 8 * (states + 1) + 2; }
};

/// Reads every stream once and writes what the optimizer would write, on `threads` threads with equal parts
/// of the range. Values that are updated in place do not change; the weight receives bits of the gradient.
/// `ahead`: bytes of software prefetch, 0 for none.
void pass_without_arithmetic(const HostStreams& streams, int threads, std::int64_t ahead);

/// Memory that is read, written and updated in place at the same time, like the operands of a kernel. Sizes
/// are multiples of 128 bytes, addresses are aligned to 64.
struct MixedStream {
  const char* read = nullptr;
  char *written = nullptr, *updated = nullptr;
  std::int64_t read_bytes = 0, written_bytes = 0, updated_bytes = 0;
  bool non_temporal = false;  ///< use non-temporal stores where memory is only written
};
void mixed_pass(const MixedStream& streams, int threads);

/// a = b + s * c with non-temporal stores: 12 bytes an element.
void triad(float* a, const float* b, const float* c, std::int64_t elements, int threads);

}  // namespace tranche::bench
