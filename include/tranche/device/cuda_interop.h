#pragma once
/// Interoperation with CUDA streams that a program owns. This header needs no CUDA header.

#include <memory>
#include <string>

#include "tranche/device/device.h"

namespace tranche {

/// A Stream over `cuda_stream`, a cudaStream_t of `device`'s GPU. The owner keeps it alive until the Stream
/// is destroyed. Work issued through either is in one order. Throws InvalidArgument when `device` is not a
/// cuda device, NotCompiled when the build has no CUDA.
std::unique_ptr<Stream> wrap_stream(Device& device, void* cuda_stream, std::string name);

/// The runtime's index of the GPU behind `device` (cudaSetDevice's argument); throws like wrap_stream.
int cuda_ordinal(const Device& device);

}  // namespace tranche
