#pragma once
#include "kernels/versions.h"
#include "tranche/kernels/copy_columns.h"

namespace tranche::kernels::cpu {

/// Like kernels/copy_columns.h with checked arguments, on the calling thread and `threads - 1` more.
OnThreads<decltype(kernels::copy_columns)> copy_columns;

}  // namespace tranche::kernels::cpu
