#pragma once
/// The numbers of a step that kernels leave in device memory for its end. Private to engine/.

#include <cstddef>
#include <cstdint>

#include "tranche/device/memory.h"
#include "tranche/kernels/reduction.h"

namespace tranche::detail {

/// One buffer: losses [micro-batches] fp64, token counts [micro-batches] int64, statistics of
/// the main gradient [trainable flat buffers].
class StepScalars {
 public:
  StepScalars() = default;
  StepScalars(MemoryResource& memory, std::int64_t micro_batches, std::size_t units)
      : micro_batches_(micro_batches),
        buffer_(memory,
                micro_batches * 16 + static_cast<std::int64_t>(units * sizeof(kernels::GradientStatistics)),
                Category::other, "step scalars") {}

  double* losses() const { return static_cast<double*>(buffer_.data()); }
  std::int64_t* tokens() const { return reinterpret_cast<std::int64_t*>(losses() + micro_batches_); }
  kernels::GradientStatistics* statistics() const {
    return reinterpret_cast<kernels::GradientStatistics*>(tokens() + micro_batches_);
  }

 private:
  std::int64_t micro_batches_ = 0;
  Buffer buffer_;
};

}  // namespace tranche::detail
