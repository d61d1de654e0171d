#pragma once
#include "kernels/versions.h"
#include "tranche/kernels/copy_columns.h"

namespace tranche::kernels::cpu {

/// The copy of kernels/copy_columns.h, arguments checked, on the calling thread and `threads - 1` more.
OnThreads<decltype(kernels::copy_columns)> copy_columns;

}  // namespace tranche::kernels::cpu
