#pragma once

namespace tranche::kernels {

/// Starts the threads, `threads` in all, that share the loops of kernels on the calling thread. OpenMP's
/// runtime ends the process when the system refuses it a thread; this throws ConfigurationError instead. Call
/// it on the thread that will run kernels, before the first of them.
void start_host_threads(int threads);

}  // namespace tranche::kernels
