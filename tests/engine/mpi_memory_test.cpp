// Rank 1 of several has no memory for the model. All ranks receive its error's text, including rank 0, which
// receives the message late. No rank that has the text may end before, because messages of a rank that has
// ended are lost.
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "tests/comm/errors_of_ranks.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"

namespace {

int world_rank() {
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  return rank == nullptr ? 0 : std::atoi(rank);
}

}  // namespace

// Delays the library's receive of the error's text on rank 0: a message of 4096 bytes from rank 1.
extern "C" int MPI_Irecv(void* data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  if (world_rank() == 0 && peer == 1 && count == 4096) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
  return PMPI_Irecv(data, count, type, peer, tag, comm, request);
}

int main() {
  using namespace tranche;
  RuntimeOptions options;
  options.threads = 1;
  options.staging_bytes = 1 << 20;
  options.communication_timeout = 60;
  if (world_rank() == 1) options.device_memory_limit = 2 << 20;
  Runtime runtime = Runtime::from_environment(options);
  try {
    ModelSpec model;
    model.add_unit({"wide", {{"wide.w", {1 << 20}, Initializer::zeros()}}});
    const Engine engine(runtime, model,
                        parse_config(R"({"train_micro_batch_size_per_gpu": 1})", runtime.size()));
  } catch (const OutOfMemory& error) {
    std::fprintf(stderr, "rank %d was told: %s\n", runtime.rank(), error.message().c_str());
    const int status = runtime.fail(std::current_exception());
    test::await_errors_of_ranks(runtime.rank(), runtime.size());
    return status;
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
  return 0;
}
