// A program that owns MPI divides the world into two halves and trains in each separately, through the
// communicator that it passes, with a communication thread and with inline progress. The bits must be those
// of thread ranks. Ends with 0 on success.

#include <cstdio>
#include <functional>
#include <mutex>
#include <utility>

#include "odd_model.h"
#include "tranche/comm/mpi.h"
#include "tranche/core/error.h"

namespace tranche::test {
namespace {

int failures = 0;

void check(bool right, const char* what, int world_rank) {
  if (right) return;
  std::fprintf(stderr, "[rank %d] %s\n", world_rank, what);
  ++failures;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return {};
}

int run(int world_rank) {
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, world_rank, &half);
  int ranks = 0, rank = 0;
  MPI_Comm_size(half, &ranks);
  MPI_Comm_rank(half, &rank);
  for (const bool inline_progress : {false, true}) {
    for (const auto& [stage, mesh] :
         {std::pair(0, ""), {3, ""}, {0, "replicate=*, shard=1"}, {3, "replicate=*, shard=1"}}) {
      OddRun odd;
      odd.ranks = ranks;
      odd.stage = stage;
      odd.mesh = mesh;
      odd.dtype = DataType::bfloat16;
      odd.accumulation = 1 + world_rank % 2;  // the halves do different things at the same time
      OddResult mine(ranks);
      std::mutex mutex;
      train_odd_rank(
          odd, rank,
          [&](CommunicatorOptions options) {
            options.inline_progress = inline_progress;
            return adopting(half)(options);
          },
          mine, mutex);
      if (rank != 0) continue;
      odd.overlap = false;
      if (odd.mesh.empty()) odd.reduction_group = ranks;
      const OddResult expected = train_odd(odd);
      check(mine.state == expected.state, "an adopted communicator gave other bits than thread ranks",
            world_rank);
    }
  }
  const std::string told = refusal([] {
    CommunicatorOptions options;
    options.inline_progress = true;
    make_mpi_communicator(options);
  });
  check(told.find("is for a program that hands its own MPI communicator over") != std::string::npos,
        "inline progress without an adopted communicator was not refused", world_rank);
  MPI_Comm_free(&half);
  int all = 0;
  MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  return all == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tranche::test

int main(int argc, char** argv) {
  int provided = 0, rank = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const int status = tranche::test::run(rank);
  MPI_Finalize();
  return status;
}
