/// A program that owns MPI and passes its communicator to the library. The arguments are the thread level
/// requested from MPI (serialized, multiple) and the progress mode (thread, inline). Prints "adopted: ok" on
/// rank 0, or the refusal.
#include <cstdio>
#include <cstring>

#include "tests/comm/collective_suite.h"
#include "tranche/comm/mpi.h"
#include "tranche/core/error.h"

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  const bool multiple = std::strcmp(argv[1], "multiple") == 0;
  const auto progress =
      std::strcmp(argv[2], "thread") == 0 ? tranche::Progress::thread : tranche::Progress::inline_;
  tranche::CommunicatorOptions options;
  options.timeout_seconds = 30;
  options.staging_bytes = 64 << 10;
  int status = 0, rank = 0, provided = 0;
  try {
    tranche::adopt_mpi_communicator(MPI_COMM_NULL, progress, options);
    return 65;
  } catch (const tranche::InvalidArgument& error) {
    if (error.message().find("needs a communicator of a running MPI") == std::string::npos) return 66;
  }
  MPI_Init_thread(&argc, &argv, multiple ? MPI_THREAD_MULTIPLE : MPI_THREAD_SERIALIZED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  try {
    tranche::make_mpi_communicator(options);
    status = 67;
  } catch (const tranche::LogicError& error) {
    if (error.message().find("adopt_mpi_communicator") == std::string::npos) status = 68;
  }
  try {
    const auto comm = tranche::adopt_mpi_communicator(MPI_COMM_WORLD, progress, options);
    tranche::test::check_everything(*comm, options.staging_bytes);
    if (rank == 0) std::printf("adopted: ok\n");
  } catch (const tranche::ConfigurationError& error) {
    if (rank == 0) std::printf("%s\n", error.message().c_str());
  }
  // The program can still use MPI itself.
  int sum = 0, size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Finalize();
  return sum == size * (size - 1) / 2 ? status : 69;
}
