#pragma once
#include "tranche/kernels/master_weights.h"

namespace tranche::kernels::cuda {

/// Like kernels/master_weights.h, with checked arguments. Each is one launch.
decltype(kernels::split_halves) split_halves;
decltype(kernels::join_halves) join_halves;

}  // namespace tranche::kernels::cuda
