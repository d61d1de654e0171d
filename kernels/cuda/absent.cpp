// The dispatchers call these in a build without CUDA. No device of that kind can be made there, so these are
// reached only through a stream of someone else's.

#include "kernels/cuda/cross_entropy.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/embedding.h"
#include "kernels/cuda/layer_norm.h"
#include "kernels/cuda/optimizer_update.h"
#include "kernels/cuda/reduction.h"
#include "kernels/cuda/squared_error.h"
#include "tranche/core/error.h"

namespace tranche::kernels::cuda {

namespace {

[[noreturn]] void absent() {
  throw NotCompiled("the CUDA kernels", "TRANCHE_CUDA");
}

}  // namespace

void adam_update(Stream&, const AdamArguments&, const ConstTensorView&, const TensorView&, const TensorView&,
                 const TensorView&, const TensorView&) {
  absent();
}
void adam_update(Stream&, const AdamArguments*, const ConstTensorView&, const TensorView&, const TensorView&,
                 const TensorView&, const TensorView&) {
  absent();
}
void sgd_update(Stream&, const SgdArguments&, const ConstTensorView&, const TensorView&, const TensorView&,
                const TensorView&) {
  absent();
}
void sgd_update(Stream&, const SgdArguments*, const ConstTensorView&, const TensorView&, const TensorView&,
                const TensorView&) {
  absent();
}

void cast(Stream&, const ConstTensorView&, const TensorView&) {
  absent();
}
void copy(Stream&, const ConstTensorView&, const TensorView&) {
  absent();
}
void fill_zero(Stream&, const TensorView&) {
  absent();
}
void fill_constant(Stream&, const TensorView&, float) {
  absent();
}
void fill_normal(Stream&, const TensorView&, const RandomKey&, std::int64_t, float, float) {
  absent();
}
void fill_uniform(Stream&, const TensorView&, const RandomKey&, std::int64_t, float, float) {
  absent();
}
void add(Stream&, const ConstTensorView&, const ConstTensorView&, const TensorView&) {
  absent();
}
void accumulate(Stream&, const ConstTensorView&, const TensorView&) {
  absent();
}
void add_bias(Stream&, const TensorView&, const ConstTensorView&) {
  absent();
}
void bias_gradient(Stream&, const ConstTensorView&, const TensorView&, const Workspace&) {
  absent();
}
void gelu_forward(Stream&, const ConstTensorView&, const TensorView&) {
  absent();
}
void gelu_backward(Stream&, const ConstTensorView&, const ConstTensorView&, const TensorView&) {
  absent();
}
void dropout(Stream&, const DropoutOptions&, const ConstTensorView&, const TensorView&) {
  absent();
}
void ordered_sum(Stream&, std::span<const void* const>, DataType, int, bool, const TensorView&) {
  absent();
}
void rounded_sum(Stream&, const ConstTensorView&, DataType, bool, const TensorView&) {
  absent();
}
void gradient_statistics(Stream&, const ConstTensorView&, GradientStatistics*, const Workspace&) {
  absent();
}
void add_digest(Stream&, const ConstTensorView&, std::uint64_t, std::int64_t, Digest*) {
  absent();
}

void layer_norm_forward(Stream&, const ConstTensorView&, const ConstTensorView&, const ConstTensorView&,
                        float, const TensorView&, const TensorView&, const TensorView&) {
  absent();
}
void residual_layer_norm_forward(Stream&, const ConstTensorView&, const ConstTensorView&,
                                 const ConstTensorView&, const ConstTensorView&, float, const TensorView&,
                                 const TensorView&, const TensorView&, const TensorView&) {
  absent();
}
void layer_norm_backward(Stream&, const ConstTensorView&, const ConstTensorView&, const ConstTensorView&,
                         const ConstTensorView&, const ConstTensorView&, bool, const TensorView&,
                         const TensorView&, const TensorView&, const Workspace&) {
  absent();
}
void embedding_forward(Stream&, const ConstTensorView&, const ConstTensorView&, const ConstTensorView&,
                       const TensorView&) {
  absent();
}
void embedding_backward(Stream&, const ConstTensorView&, const ConstTensorView&, const TensorView&,
                        const TensorView&) {
  absent();
}
void cross_entropy_begin(Stream&, const CrossEntropyState&) {
  absent();
}
void cross_entropy_accumulate(Stream&, const ConstTensorView&, const ConstTensorView&, std::int64_t,
                              const CrossEntropyState&) {
  absent();
}
void cross_entropy_finish(Stream&, const ConstTensorView&, const CrossEntropyState&, const TensorView&,
                          const TensorView&) {
  absent();
}
void cross_entropy_gradient(Stream&, const ConstTensorView&, const ConstTensorView&, std::int64_t,
                            const CrossEntropyState&, float, const TensorView&) {
  absent();
}
void squared_error(Stream&, const ConstTensorView&, const ConstTensorView&, const TensorView&,
                   const TensorView&) {
  absent();
}
void squared_error_gradient(Stream&, const ConstTensorView&, const ConstTensorView&, float,
                            const TensorView&) {
  absent();
}

}  // namespace tranche::kernels::cuda
