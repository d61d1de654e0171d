#pragma once
/// The NVTX ranges that a program has passed to the injected profiler of cuda_nvtx_injection.cpp.

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "tests/core/program_output.h"

namespace tranche::testing_support {

/// The profiler's library: beside the program, as in a bundle, or in the build folder.
inline const std::string nvtx_library = test::beside_program("libnvtx_injection.so", TRANCHE_NVTX_INJECTION);
/// NVTX looks for its profiler at the first call in the process.
inline const int nvtx_injected = ::setenv("NVTX_INJECTION64_PATH", nvtx_library.c_str(), 1);

/// The lines since the last call: "push NAME", "pop", "start NUMBER NAME", "end NUMBER".
inline std::vector<std::string> take_nvtx_log() {
  std::vector<std::string> lines;
  void* const library = ::dlopen(nvtx_library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    ADD_FAILURE() << "NVTX did not load " << nvtx_library;
    return lines;
  }
  const auto take = reinterpret_cast<const char* (*)()>(::dlsym(library, "nvtx_log_take"));
  std::istringstream text(take != nullptr ? take() : "");
  ::dlclose(library);
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

}  // namespace tranche::testing_support
