#pragma once
/// A sticky CUDA error, for tests.

#include "tranche/device/stream.h"

namespace tranche::test {

/// Launches a kernel on the cuda device's stream that writes to an invalid address. Afterwards the process
/// cannot use the GPU any more.
void lose_cuda_context(Stream& stream);

}  // namespace tranche::test
