/// A program that owns MPI and passes its communicator to the library. The arguments are the thread level
/// requested from MPI (funneled, serialized, multiple) and the progress mode (thread, inline). Prints
/// "adopted: ok" on rank 0, or the refusal.
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "tests/comm/collective_suite.h"
#include "tranche/comm/mpi.h"
#include "tranche/core/error.h"

namespace {

/// The message of the Problem that `call` throws; empty if it throws none.
template <typename Problem>
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Problem& error) {
    return error.message();
  }
  return {};
}

bool has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

/// The status of a check that failed; 0: none did.
int check_refusals(int level, const tranche::CommunicatorOptions& options) {
  using tranche::Progress;
  const auto refused = [&](MPI_Comm communicator) {
    return refusal<tranche::InvalidArgument>(
        [&] { tranche::adopt_mpi_communicator(communicator, Progress::inline_, options); });
  };
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm outside = MPI_COMM_NULL, part = MPI_COMM_NULL, between = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, MPI_UNDEFINED, rank, &outside);
  if (!has(refused(outside), "got MPI_COMM_NULL, which MPI_Comm_split gives a rank with MPI_UNDEFINED"))
    return 70;
  MPI_Comm_split(MPI_COMM_WORLD, rank == 0 ? 0 : 1, rank, &part);
  MPI_Intercomm_create(part, 0, MPI_COMM_WORLD, rank == 0 ? 1 : 0, 7, &between);
  if (!has(refused(between), "got an intercommunicator, which connects two groups")) return 71;
  MPI_Comm_free(&between);
  MPI_Comm_free(&part);
  if (level != MPI_THREAD_FUNNELED) return 0;
  std::string told;
  std::thread([&] {
    told = refusal<tranche::ConfigurationError>(
        [&] { tranche::adopt_mpi_communicator(MPI_COMM_WORLD, Progress::inline_, options); });
  }).join();
  return has(told, "MPI was initialised with MPI_THREAD_FUNNELED, so only the thread that initialised it")
             ? 0
             : 72;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  const int level = std::strcmp(argv[1], "multiple") == 0   ? MPI_THREAD_MULTIPLE
                    : std::strcmp(argv[1], "funneled") == 0 ? MPI_THREAD_FUNNELED
                                                            : MPI_THREAD_SERIALIZED;
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
  MPI_Init_thread(&argc, &argv, level, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  try {
    tranche::make_mpi_communicator(options);
    status = 67;
  } catch (const tranche::LogicError& error) {
    if (error.message().find("adopt_mpi_communicator") == std::string::npos) status = 68;
  }
  if (status == 0) status = check_refusals(provided, options);
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
