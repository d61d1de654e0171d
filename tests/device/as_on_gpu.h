#pragma once
/// The sizes and comparisons that a test takes: a GPU's, or those that its emulation manages.

#include <cstdlib>
#include <string_view>

#include "device/cuda_probe.h"

namespace tranche::test {

/// True where a test takes what is written for a GPU: on one, and with TRANCHE_TEST_AS_ON_GPU=1 on the
/// emulated one, so that this code runs before a GPU is at hand (the CTest entries *.as_on_gpu). False on the
/// emulation otherwise, which takes milliseconds for what a GPU does in microseconds.
inline bool as_on_gpu() {
  const char* asked = std::getenv("TRANCHE_TEST_AS_ON_GPU");
  return !detail::probe_cuda().emulated || (asked != nullptr && std::string_view(asked) == "1");
}

}  // namespace tranche::test
