#pragma once
/// The operands of a GEMM that is measured by itself.

#include <memory>

#include "bench/bare_gemms.h"
#include "bench/kernel_bench.h"

namespace tranche::bench {

/// Random operands in the step's layout, and a device on which they are multiplied.
struct GemmOperands {
  kernels::Gemm gemm;
  kernels::bench::BenchMachine machine;
  kernels::bench::BenchTensor a, b, c;

  GemmOperands(const kernels::Gemm& p, int threads)
      : gemm(p),
        machine(threads),
        a(p.dtype, p.transpose_a ? Shape{p.k, p.m} : Shape{p.m, p.k}),
        b(p.dtype, p.transpose_b ? Shape{p.n, p.k} : Shape{p.k, p.n}),
        c(p.c_dtype, {p.m, p.n}) {}

  void multiply() {
    kernels::matmul(machine.stream(), {gemm.transpose_a, gemm.transpose_b, gemm.accumulate}, a.view(),
                    b.view(), c.view(), machine.workspace());
  }
};

inline GemmWay our_way(const std::shared_ptr<GemmOperands>& operands) {
  return {"ours", [operands] { operands->multiply(); }};
}

}  // namespace tranche::bench
