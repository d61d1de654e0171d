#pragma once
/// The addresses of the `__shared__` variables of this program's kernels in the calling thread.

#include <cstddef>
#include <vector>

namespace cuda_emulation {

struct SharedVariable {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// Found in the symbol table of the running program, by the tag that `__shared__` gives them; empty if the
/// program was stripped.
std::vector<SharedVariable> shared_variables_of_this_thread();

}  // namespace cuda_emulation
