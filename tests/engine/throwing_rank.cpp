/// throwing_rank WHERE CAUGHT [RANKS]: a stage 3 run in which rank 1 throws in its second step.
///   WHERE   forward: while it holds a unit; backward: while it holds a unit and its gradients; between:
///           between two micro-batches; evaluation: while it holds a unit
///   CAUGHT  inside the engine's lifetime; outside of it (while the runtime exists); both; or nowhere:
///   outside the
///           runtime as well, by code that does not inform the peers
///   RANKS   thread ranks of this process; without it, the ranks of mpirun
/// Prints the time of rank 1's exception in seconds of the host's monotonic clock, and the status with which
/// each rank ends.

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "on_ranks.h"
#include "tests/comm/errors_of_ranks.h"

namespace tranche::test {
namespace {

struct Way {
  std::string where, caught;
};

void throw_at(const Engine& engine, const Way& way, const char* place) {
  if (way.where != place || engine.runtime().rank() != 1 || engine.steps() != 1) return;
  std::printf("threw at %.3f\n", detail::seconds_now());
  std::fflush(stdout);
  throw std::runtime_error("file 7 of rank 1 has no tokens");
}

void forward(Engine& engine, const Way& way, const char* place) {
  for (int unit = 0; unit < 4; ++unit) {
    const GatheredUnit weights = engine.gather({unit});
    if (unit == 1) throw_at(engine, way, place);
  }
}

void micro_batch(Engine& engine, const Way& way) {
  engine.begin_micro_batch();
  forward(engine, way, "forward");
  for (const int unit : {0, 3, 2, 1, 0}) {
    const GatheredUnit weights = engine.gather({unit});
    UnitGradients gradients = engine.gradients({unit});
    if (unit == 2) throw_at(engine, way, "backward");
    std::move(gradients).reduce();
  }
  end_with(engine, 1, 1);
}

void train(Engine& engine, const Way& way) {
  for (int step = 0; step < 4; ++step) {
    micro_batch(engine, way);
    throw_at(engine, way, "between");
    micro_batch(engine, way);
    engine.step();
    engine.begin_evaluation();
    engine.begin_micro_batch();
    forward(engine, way, "evaluation");
    end_with(engine, 1, 1);
    engine.end_evaluation();
  }
}

Config configuration(int ranks) {
  OddRun run;
  run.ranks = ranks;
  run.stage = 3;
  run.accumulation = 2;
  return odd_config(run);
}

int run_rank(Runtime& runtime, const Way& way) {
  const Config config = configuration(runtime.size());
  if (way.caught == "outside") {
    try {
      Engine engine(runtime, odd_model(), config);
      train(engine, way);
    } catch (...) {
      return runtime.fail(std::current_exception());
    }
    return 0;
  }
  Engine engine(runtime, odd_model(), config);
  try {
    train(engine, way);
  } catch (...) {
    const int status = engine.fail(std::current_exception());
    return way.caught == "both" ? runtime.fail(std::current_exception()) : status;
  }
  return 0;
}

void say_end(int rank, int status) {
  std::printf("rank %d ends with %d\n", rank, status);
  std::fflush(stdout);
}

int run_rank_and_say(const CommunicatorFactory& factory, int ranks, const Way& way) {
  int rank = 0, status = 0;
  try {
    Runtime runtime(RuntimeOptions::from(configuration(ranks)), factory);
    rank = runtime.rank();
    if (way.caught == "nowhere") {
      Engine engine(runtime, odd_model(), configuration(ranks));
      train(engine, way);
    } else {
      status = run_rank(runtime, way);
    }
    // Printed before the first process ends, because the launcher then ends the others.
    say_end(rank, status);
    await_errors_of_ranks(rank, ranks);
  } catch (const std::exception& error) {
    status = 1;
    std::printf("rank %d was ended by: %s\n", rank, error.what());
    say_end(rank, status);
  }
  return status;
}

}  // namespace
}  // namespace tranche::test

int main(int argc, char** argv) {
  using namespace tranche;
  using namespace tranche::test;
  if (argc < 3) return 64;
  const Way way{argv[1], argv[2]};
  if (argc == 3) {
    const int ranks = std::atoi(std::getenv("OMPI_COMM_WORLD_SIZE"));
    return run_rank_and_say([](const CommunicatorOptions& o) { return make_mpi_communicator(o); }, ranks,
                            way);
  }
  const int ranks = std::atoi(argv[3]);
  const ThreadGroup group(ranks);
  std::vector<int> statuses(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[static_cast<std::size_t>(rank)] = run_rank_and_say(
          [&](const CommunicatorOptions& options) { return group.communicator(rank, options); }, ranks, way);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int status : statuses) {
    if (status != 0) return status;
  }
  return 0;
}
