// Trains on the even ranks of a program that owns MPI, while the odd ranks do something else:
// mpirun -n 4 adopt_communicator
#include <tranche/comm/mpi.h>
#include <tranche/models/gpt.h>
#include <tranche/tranche.h>

#include <cstdio>
#include <vector>
using namespace tranche;

int train(MPI_Comm communicator) {
  Runtime runtime;
  try {
    runtime = Runtime(RuntimeOptions{}, adopting(communicator));
    const models::Gpt gpt(models::GptConfig::preset("gpt-nano"));
    Engine engine(runtime, models::Gpt::spec(gpt.config(), 64),
                  parse_config(R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})",
                               runtime.size()));
    const std::vector<std::int32_t> text(65, 'a');
    const std::int64_t sample = runtime.rank();
    StepResult result;
    for (int step = 0; step < 20; ++step) {
      gpt.forward_backward(engine, {{text.data(), DataType::int32, {1, 64}},
                                    {text.data() + 1, DataType::int32, {1, 64}},
                                    {&sample, 1}});
      result = engine.step();
    }
    if (runtime.rank() == 0) std::printf("%d ranks, loss %.4f\n", runtime.size(), result.loss);
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
  return 0;
}

int main(int argc, char** argv) {
  int provided = 0, rank = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  const int status = rank % 2 == 0 ? train(half) : 0;  // the odd ranks are yours
  MPI_Comm_free(&half);
  MPI_Finalize();
  return status;
}
