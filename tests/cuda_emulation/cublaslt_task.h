#pragma once
/// From cuBLASLt's descriptions to the product that they ask for.

#include <cublasLt.h>

#include <cstdint>
#include <string>

#include "tests/cuda_emulation/product.h"

namespace cuda_emulation {

/// The content here of the header's opaque description of a product.
struct Description {
  std::int32_t compute, scale, pointer_mode, transpose_a, transpose_b, bias_type, auxiliary_type,
      multiprocessors;
  std::uint32_t epilogue;
  const void* bias;
  void* auxiliary;
  std::int64_t bias_next, auxiliary_leading, auxiliary_next;
};
/// The same of a matrix.
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

/// The task but for pointers and scalars, or why there is none.
cublasStatus_t plan(const Description& description, const Operands& layouts, ProductTask& task,
                    std::string& why);

/// Why memory that the task touches is not memory of the device; empty when all is.
std::string check_ranges(const ProductTask& task, bool reads_c);

}  // namespace cuda_emulation
