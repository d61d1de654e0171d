#pragma once
#include "tranche/kernels/embedding.h"

namespace tranche::kernels::cuda {

/// As in kernels/embedding.h, arguments checked. Forward is one launch, backward two, or one without
/// positions.
decltype(kernels::embedding_forward) embedding_forward;
decltype(kernels::embedding_backward) embedding_backward;

}  // namespace tranche::kernels::cuda
