// What the dispatchers call in a build without CUDA. No device of that kind can be made there, so these are
// reached only through a stream of someone else's.

#include "tranche/core/error.h"
#include "tranche/kernels/cuda/optimizer_update.h"

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

}  // namespace tranche::kernels::cuda
