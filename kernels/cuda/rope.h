#pragma once
#include "tranche/kernels/rope.h"

namespace tranche::kernels::cuda {

/// As in kernels/rope.h, arguments checked. One launch each; a table takes one for each 512 frequencies,
/// which its parameters carry.
decltype(kernels::rope_table) rope_table;
decltype(kernels::rope) rope;

}  // namespace tranche::kernels::cuda
