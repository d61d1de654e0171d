#pragma once
/// Chooses between the sizes and comparisons for a GPU and those that the emulation can handle.

#include <cstdlib>
#include <string_view>

#include "device/cuda_probe.h"

namespace tranche::test {

/// True if a test uses those for a GPU: on a GPU, and with TRANCHE_TEST_AS_ON_GPU=1 on the emulation (the
/// CTest entries *.as_on_gpu), so that this code runs before a GPU is available. False on the emulation
/// otherwise, which takes milliseconds for what a GPU does in microseconds.
inline bool as_on_gpu() {
  const char* asked = std::getenv("TRANCHE_TEST_AS_ON_GPU");
  return !detail::probe_cuda().emulated || (asked != nullptr && std::string_view(asked) == "1");
}

}  // namespace tranche::test
