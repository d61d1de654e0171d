#pragma once
#include "tranche/kernels/rope.h"

namespace tranche::kernels::cuda {

/// Like kernels/rope.h, with checked arguments. One launch each; a table takes one for each 512 frequencies,
/// which are kernel parameters.
decltype(kernels::rope_table) rope_table;
decltype(kernels::rope) rope;

}  // namespace tranche::kernels::cuda
