#pragma once

namespace tranche::kernels {

/// Starts the threads with which kernels on the calling thread share their loops, `threads` in all. OpenMP's
/// runtime ends the process when the system refuses it one; here that is a ConfigurationError. Call it on the
/// thread that will run kernels, before the first of them.
void start_host_threads(int threads);

}  // namespace tranche::kernels
