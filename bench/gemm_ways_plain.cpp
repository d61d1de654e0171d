// Builds without the libraries (TRANCHE_PLAIN_KERNELS) have only our way.
#include "bench/gemm_ways.h"

namespace tranche::bench {

std::vector<GemmWay> ways_of(const kernels::Gemm& gemm, int threads) {
  return {our_way(std::make_shared<GemmOperands>(gemm, threads))};
}

}  // namespace tranche::bench
