#pragma once
#include "kernels/versions.h"
#include "tranche/kernels/master_weights.h"

namespace tranche::kernels::cpu {

/// As in kernels/master_weights.h, arguments checked, on the calling thread and `threads - 1` more.
OnThreads<decltype(kernels::split_halves)> split_halves;
OnThreads<decltype(kernels::join_halves)> join_halves;

}  // namespace tranche::kernels::cpu
