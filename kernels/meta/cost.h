#pragma once
/// The cost of a kernel call on a device. The functions that compute it are pure and used on every device
/// kind, so a run on `meta` and a run on `cpu` count the same.

#include "device/work_recorder.h"

namespace tranche::kernels::meta {

struct Cost {
  double operations = 0;  ///< floating-point operations; a multiply-add is two
  double bytes_read = 0;
  double bytes_written = 0;
  detail::GemmShape gemm = {};  ///< its GEMM, if it has one (m > 0); speed depends on the shape

  Cost& operator+=(const Cost& other) {
    operations += other.operations;
    bytes_read += other.bytes_read;
    bytes_written += other.bytes_written;
    return *this;
  }
  friend bool operator==(const Cost&, const Cost&) = default;
};

}  // namespace tranche::kernels::meta
