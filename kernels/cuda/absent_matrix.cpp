// The dispatchers of matrix products and attention call these in a build without CUDA.

#include "kernels/cuda/attention.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/product.h"
#include "tranche/core/error.h"

namespace tranche::kernels::cuda {

namespace {

[[noreturn]] void absent() {
  throw NotCompiled("the CUDA kernels", "TRANCHE_CUDA");
}

}  // namespace

void product(Stream&, const Product&, const Workspace&) {
  absent();
}
void attention_forward(Stream&, const AttentionCall&, const Workspace&) {
  absent();
}
void attention_backward(Stream&, const AttentionCall&, const Workspace&) {
  absent();
}
void flash_forward(Stream&, const AttentionCall&) {
  absent();
}
void flash_backward(Stream&, const AttentionCall&, const Workspace&) {
  absent();
}
void products_forward(Stream&, const AttentionCall&, const Workspace&) {
  absent();
}
void products_backward(Stream&, const AttentionCall&, const Workspace&) {
  absent();
}
std::string_view name_of(AttentionPath) {
  absent();
}
void matmul_bias(Stream&, Product, const TensorView&, const ConstTensorView&, const Workspace&) {
  absent();
}
void matmul_bias_gelu(Stream&, Product, const TensorView&, const TensorView&, const ConstTensorView&,
                      const Workspace&) {
  absent();
}
void matmul_gelu_backward(Stream&, Product, const ConstTensorView&, const TensorView&, const Workspace&) {
  absent();
}
std::string_view matmul_path(DataType) {
  absent();
}
std::string matmul_libraries() {
  absent();
}

}  // namespace tranche::kernels::cuda
