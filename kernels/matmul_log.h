#pragma once
/// A list of the GEMMs that are issued to a stream, for measurements.

#include <cstdint>
#include <vector>

#include "tranche/core/dtype.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// c[m, n] = op(a)[m, k] op(b)[k, n], or c += ..., as matmul and its fused forms compute it.
struct Gemm {
  bool transpose_a = false, transpose_b = false, accumulate = false;
  std::int64_t m = 0, n = 0, k = 0;
  DataType dtype = DataType::float32;    ///< of a and b
  DataType c_dtype = DataType::float32;  ///< of c
  friend auto operator<=>(const Gemm&, const Gemm&) = default;
};

/// Kept with the stream (Stream::attachment), on every kind of device. Null: GEMMs are not listed.
struct MatmulLog {
  std::vector<Gemm>* gemms = nullptr;
};

/// Appends every GEMM issued to the stream from now on to `gemms`, which must outlive the recording; null
/// ends it. For the issuing thread.
inline void log_gemms(Stream& stream, std::vector<Gemm>* gemms) {
  stream.attachment<MatmulLog>().gemms = gemms;
}

}  // namespace tranche::kernels
