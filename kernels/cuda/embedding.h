#pragma once
#include "tranche/kernels/embedding.h"

namespace tranche::kernels::cuda {

/// Like kernels/embedding.h, with checked arguments. Forward is one launch, backward two, or one without
/// positions.
decltype(kernels::embedding_forward) embedding_forward;
decltype(kernels::embedding_backward) embedding_backward;

}  // namespace tranche::kernels::cuda
