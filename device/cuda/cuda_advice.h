#pragma once
/// Advice for cases in which the runtime cannot use a GPU for a reason outside the program.

#include <cuda_runtime_api.h>

#include <string>

namespace tranche::cuda {

/// "; " and a sentence for errors of the driver's installation, of the container and of the GPU's mode; empty
/// for all others.
std::string advice_of(cudaError_t error);

/// Formats CUDA's 13000 as "13.0".
std::string version_text(int version);

}  // namespace tranche::cuda
