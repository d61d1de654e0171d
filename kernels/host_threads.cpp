#include "kernels/host_threads.h"

#include <fmt/format.h>

#include <system_error>

#include "device/worker_team.h"
#include "tranche/core/error.h"

namespace tranche::kernels {

void start_host_threads(int threads) {
  if (threads <= 1) return;
  try {
    const detail::WorkerTeam as_many(threads);
  } catch (const std::system_error& refusal) {
    throw ConfigurationError(fmt::format(
        "the system does not start {} threads for this rank: {}; lower tranche.threads (--threads), or raise "
        "the limit ('ulimit -u', 'ulimit -v', or pids.max of the control group)",
        threads, refusal.code().message()));
  }
  // The OpenMP team keeps these threads for the calling thread's loops, so no other rank takes the ones just
  // freed.
#pragma omp parallel num_threads(threads)
  {}
}

}  // namespace tranche::kernels
