#pragma once
/// The scalars of a step, which kernels leave in device memory until its end. Private to engine/.

#include <cstddef>
#include <cstdint>

#include "tranche/device/memory.h"
#include "tranche/kernels/reduction.h"

namespace tranche::detail {

/// One buffer: losses [micro-batches] fp64, token counts [micro-batches] int64, statistics of the main
/// gradient [trainable flat buffers], and, if the noise of gradients is measured, of separate gradients
/// [pieces, trainable flat buffers].
class StepScalars {
 public:
  StepScalars() = default;
  StepScalars(MemoryResource& memory, std::int64_t micro_batches, std::size_t units, std::int64_t pieces = 0)
      : micro_batches_(micro_batches),
        units_(units),
        pieces_(pieces),
        buffer_(memory,
                micro_batches * 16 +
                    (1 + pieces) * static_cast<std::int64_t>(units * sizeof(kernels::GradientStatistics)),
                Category::other, "step scalars") {}

  double* losses() const { return static_cast<double*>(buffer_.data()); }
  std::int64_t* tokens() const { return reinterpret_cast<std::int64_t*>(losses() + micro_batches_); }
  kernels::GradientStatistics* statistics() const {
    return reinterpret_cast<kernels::GradientStatistics*>(tokens() + micro_batches_);
  }
  /// True if the noise of gradients is measured.
  bool has_pieces() const { return pieces_ > 0; }
  kernels::GradientStatistics* of_piece(std::int64_t piece) const {
    return statistics() + static_cast<std::size_t>(1 + piece) * units_;
  }

 private:
  std::int64_t micro_batches_ = 0;
  std::size_t units_ = 0;
  std::int64_t pieces_ = 0;
  Buffer buffer_;
};

}  // namespace tranche::detail
