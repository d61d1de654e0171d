/// A job in which rank 1 fails in the way that the first argument names: throw, hang (hang-2: rank 2 hangs),
/// kill, differ (it issues another call), leave (it ends normally before the others), or none. With a second
/// argument the ranks read each other's memory: "shared" on one node, "nodes" on several declared nodes of
/// two ranks. On an error every rank does what a user's program would do: it posts the failure to the peers,
/// prints it, and ends the job.
#include <csignal>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/comm/errors_of_ranks.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"

namespace {

void work(tranche::Communicator& comm, const std::string& way, const tranche::ReductionOptions& sum) {
  const tranche::OperationLabel label{"h.3", "backward"};
  const int n = comm.size();
  std::vector<float> full(static_cast<std::size_t>(n) * 1000, 1.0f), shard(1000);
  for (int step = 0; step < 5; ++step) {
    if (step == 3 && way == "hang-2" && comm.rank() == 2) std::this_thread::sleep_for(std::chrono::hours(1));
    if (step == 3 && comm.rank() == 1) {
      if (way == "throw") throw tranche::NumericalError("loss is not finite in step 3");
      if (way == "leave") return;
      if (way == "kill") std::raise(SIGKILL);
      if (way == "differ") {
        // The number of bytes is that of the others' call.
        comm.all_gather(shard.data(), full.data(), 1000, tranche::DataType::float32, 0, {},
                        {"h.2", "forward"})
            .wait();
      }
      if (way == "hang") std::this_thread::sleep_for(std::chrono::hours(1));
    }
    comm.reduce_scatter(full.data(), tranche::DataType::float32, shard.data(), tranche::DataType::float32,
                        1000, sum, {}, label)
        .wait();
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) return 64;
  tranche::CommunicatorOptions options;
  if (argc == 3) options.collectives = tranche::NodeCollectives::shared;
  tranche::ReductionOptions sum;
  if (argc == 3 && std::string(argv[2]) == "nodes") options.local_size = sum.group_size = 2;
  const std::string way = argv[1];
  // Elsewhere no time-out may pass, however busy the machine is.
  options.timeout_seconds = way.starts_with("hang") ? 4 : 60;
  if (way == "twice") {
    const int rank = tranche::make_mpi_communicator(options)->rank();
    try {
      (void)tranche::make_mpi_communicator(options);
    } catch (const tranche::LogicError& error) {
      std::printf("rank %d refuses: %s\n", rank, error.message().c_str());
    }
    return 0;
  }
  const auto comm = tranche::make_mpi_communicator(options);
  try {
    work(*comm, way, sum);
  } catch (const tranche::Error& error) {
    std::fprintf(stderr, "rank %d ends: %s\n", comm->rank(), error.what());
    comm->post_failure(error.message(), error.exit_status(), 2);
    // A rank that hangs, was killed or has left prints no error.
    tranche::test::await_errors_of_ranks(comm->rank(),
                                         comm->size() - (way == "throw" || way == "differ" ? 0 : 1));
    // The peers end the job, not the rank that failed.
    const bool began_here = dynamic_cast<const tranche::CommunicationError*>(&error) == nullptr;
    if (began_here) std::this_thread::sleep_for(std::chrono::minutes(1));
    comm->abort_job(static_cast<int>(error.exit_status()));
  }
  std::printf("rank %d is done\n", comm->rank());
  return 0;
}
