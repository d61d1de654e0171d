#pragma once
#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::cuda {

/// Operands checked; one launch for each 128 segments.
decltype(kernels::adam_update) adam_update;
decltype(kernels::sgd_update) sgd_update;

}  // namespace tranche::kernels::cuda
