#pragma once
#include "kernels/versions.h"
#include "tranche/kernels/master_weights.h"

namespace tranche::kernels::cpu {

/// Like kernels/master_weights.h with checked arguments, on the calling thread and `threads - 1` more.
OnThreads<decltype(kernels::split_halves)> split_halves;
OnThreads<decltype(kernels::join_halves)> join_halves;

}  // namespace tranche::kernels::cpu
