#pragma once
/// The operands of a product that is measured alone.

#include <memory>

#include "bench/kernel_bench.h"
#include "bench/products_bench.h"

namespace tranche::bench {

/// Random operands as the step stores them, and a machine to multiply them on.
struct ProductOperands {
  kernels::Product product;
  kernels::bench::BenchMachine machine;
  kernels::bench::BenchTensor a, b, c;

  ProductOperands(const kernels::Product& p, int threads)
      : product(p),
        machine(threads),
        a(p.dtype, p.transpose_a ? Shape{p.k, p.m} : Shape{p.m, p.k}),
        b(p.dtype, p.transpose_b ? Shape{p.n, p.k} : Shape{p.k, p.n}),
        c(p.c_dtype, {p.m, p.n}) {}

  void multiply() {
    kernels::matmul(machine.stream(), {product.transpose_a, product.transpose_b, product.accumulate},
                    a.view(), b.view(), c.view(), machine.workspace());
  }
};

inline ProductWay our_way(const std::shared_ptr<ProductOperands>& operands) {
  return {"ours", [operands] { operands->multiply(); }};
}

}  // namespace tranche::bench
