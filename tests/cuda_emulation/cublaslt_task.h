#pragma once
/// Translates cuBLASLt's descriptors into the product that they describe.

#include <cublasLt.h>

#include <cstdint>
#include <string>

#include "tests/cuda_emulation/product.h"

namespace cuda_emulation {

/// The contents of an opaque matmul descriptor in this emulation.
struct Description {
  std::int32_t compute, scale, pointer_mode, transpose_a, transpose_b, bias_type, auxiliary_type,
      multiprocessors;
  std::uint32_t epilogue;
  const void* bias;
  void* auxiliary;
  std::int64_t bias_next, auxiliary_leading, auxiliary_next;
};
/// The contents of an opaque matrix layout in this emulation.
struct Layout {
  std::uint32_t type;
  std::int32_t order;
  std::uint64_t rows, columns;
  std::int64_t leading, next;
  std::int32_t batch;
};
struct Operands {
  Layout a, b, c, d;
};

/// Fills in the task except for pointers and scalars, or returns the reason why it is not supported.
cublasStatus_t plan(const Description& description, const Operands& layouts, ProductTask& task,
                    std::string& why);

/// The reason if memory that the task accesses is not device memory; else empty.
std::string check_ranges(const ProductTask& task, bool reads_c);

}  // namespace cuda_emulation
