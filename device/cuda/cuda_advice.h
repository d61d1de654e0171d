#pragma once
/// Advice for the case that the runtime cannot use a GPU for a reason that lies outside of the program.

#include <cuda_runtime_api.h>

#include <string>

namespace tranche::cuda {

/// "; " and a sentence for errors of the driver's installation, of the container and of the GPU's mode; empty
/// for all others.
std::string advice_of(cudaError_t error);

/// The text of "13.0" for CUDA's 13000.
std::string version_text(int version);

}  // namespace tranche::cuda
