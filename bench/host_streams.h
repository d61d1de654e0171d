#pragma once
/// Memory traffic without arithmetic: an optimizer's pass, or any mix, the floor that kernels are held
/// against.

#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::bench {

/// Memory of `elements` elements each; `states` fp32 moments (0 to 2) that are read and written in place,
/// like `master`. The weight is bf16, written with non-temporal stores, aligned to 64 bytes.
struct HostStreams {
  const void* gradient = nullptr;
  DataType gradient_type = DataType::bfloat16;
  float* master = nullptr;
  float* state[2] = {};
  int states = 2;
  bfloat16* weight = nullptr;
  std::int64_t elements = 0;

  /// 28 of Adam with a 16-bit gradient: 2 + 3 * 8 + 2.
  std::int64_t bytes_per_element() const { return size_of(gradient_type) + 8 * (states + 1) + 2; }
};

/// Reads every stream once and writes what the optimizer would write, on `threads` threads by equal parts of
/// the range. Values in place stay as they are; the weight becomes bits of the gradient. `ahead`: bytes of
/// software prefetch, 0 for none.
void pass_without_arithmetic(const HostStreams& streams, int threads, std::int64_t ahead);

/// Memory that is read, written and updated in place at one pace, as a kernel has several operands. Bytes are
/// multiples of 128, memory is aligned to 64.
struct MixedStream {
  const char* read = nullptr;
  char *written = nullptr, *updated = nullptr;
  std::int64_t read_bytes = 0, written_bytes = 0, updated_bytes = 0;
  bool non_temporal = false;  ///< how what is only written is stored
};
void mixed_pass(const MixedStream& streams, int threads);

/// a = b + s * c with non-temporal stores: 12 bytes an element.
void triad(float* a, const float* b, const float* c, std::int64_t elements, int threads);

}  // namespace tranche::bench
