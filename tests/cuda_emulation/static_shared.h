#pragma once
/// The addresses of the `__shared__` variables of this program's kernels for the calling thread.

#include <cstddef>
#include <vector>

namespace cuda_emulation {

struct SharedVariable {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// By the symbol table of the running program, where the tag that `__shared__` gives marks them; empty if it
/// has been stripped.
std::vector<SharedVariable> shared_variables_of_this_thread();

}  // namespace cuda_emulation
