#pragma once
/// A CUDA error that stays, for tests.

#include "tranche/device/stream.h"

namespace tranche::test {

/// Launches a kernel on the cuda device's stream that writes where no memory is. The process can do nothing
/// with the GPU from then on.
void lose_cuda_context(Stream& stream);

}  // namespace tranche::test
