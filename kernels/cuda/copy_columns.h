#pragma once
#include "tranche/kernels/copy_columns.h"

namespace tranche::kernels::cuda {

/// The copy of kernels/copy_columns.h, arguments checked: one copy of the runtime's.
decltype(kernels::copy_columns) copy_columns;

}  // namespace tranche::kernels::cuda
