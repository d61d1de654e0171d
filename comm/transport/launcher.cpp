#include <cstdlib>

#include "tranche/comm/backends.h"

namespace tranche {

bool started_by_mpi_launcher() {
  // Open MPI's mpirun; PMI-1/2 (MPICH, Slurm); PMIx (Slurm, PRRTE).
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

int ranks_of_node_by_launcher() {
  const char* text = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  return text == nullptr ? 0 : std::atoi(text);
}

}  // namespace tranche
