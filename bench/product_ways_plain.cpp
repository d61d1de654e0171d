// Builds without the libraries (TRANCHE_PLAIN_KERNELS) know one way.
#include "bench/product_ways.h"

namespace tranche::bench {

std::vector<ProductWay> ways_of(const kernels::Product& product, int threads) {
  return {our_way(std::make_shared<ProductOperands>(product, threads))};
}

}  // namespace tranche::bench
