#pragma once
/// Adopts a caller's MPI communicator. This is the only public header that includes mpi.h; users include it
/// as <tranche/comm/mpi.h>.

// The C++ bindings, which MPI 3 removed, would require another library.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include "tranche/comm/backends.h"

namespace tranche {

/// The thread that makes MPI operations progress: a separate one, or the caller's.
enum class Progress { thread, inline_ };

/// Duplicates `communicator` (collective over it) and never finalises MPI. `thread` needs
/// MPI_THREAD_MULTIPLE; with less, Progress::thread throws a ConfigurationError that names `inline`. With
/// inline_, MPI calls are made only inside calls of the engine, on the calling thread.
std::unique_ptr<Communicator> adopt_mpi_communicator(MPI_Comm communicator, Progress progress,
                                                     const CommunicatorOptions& options = {});

/// For Runtime(options, adopting(communicator)): adopts it with the progress that the options request.
inline CommunicatorFactory adopting(MPI_Comm communicator) {
  return [communicator](const CommunicatorOptions& options) {
    return adopt_mpi_communicator(communicator,
                                  options.inline_progress ? Progress::inline_ : Progress::thread, options);
  };
}

}  // namespace tranche
