/// Replaces the MPI backend in builds without it.
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"

namespace tranche {

std::unique_ptr<Communicator> make_mpi_communicator(const CommunicatorOptions&) {
  throw NotCompiled("Open MPI", "TRANCHE_MPI");
}

std::string mpi_version() {
  return "not compiled";
}

}  // namespace tranche
