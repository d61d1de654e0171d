#pragma once
#include "tranche/kernels/cross_entropy.h"

namespace tranche::kernels::cuda {

/// Like kernels/cross_entropy.h, with checked arguments; one launch each.
decltype(kernels::cross_entropy_begin) cross_entropy_begin;
decltype(kernels::cross_entropy_accumulate) cross_entropy_accumulate;
decltype(kernels::cross_entropy_combine) cross_entropy_combine;
decltype(kernels::cross_entropy_finish) cross_entropy_finish;
decltype(kernels::cross_entropy_gradient) cross_entropy_gradient;

}  // namespace tranche::kernels::cuda
