#pragma once
/// Runs independent tasks of unequal cost on the threads of a stream.

#include <atomic>
#include <cstdint>
#include <exception>

#include "device/worker_team.h"

namespace tranche::kernels::cpu {

/// Calls body(i, slot) for i in [0, count) on up to `threads` threads; a free thread takes the next i. `slot`
/// in [0, threads) is unique to the running thread, for scratch memory. The assignment of i to threads must
/// not change the result. With one thread it runs in the caller, without OpenMP. When bodies throw, one of
/// their exceptions is rethrown.
template <class Body>
void parallel_tasks(int threads, std::int64_t count, const Body& body) {
  if (threads <= 1 || count <= 1) {
    for (std::int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  if (detail::WorkerTeam* workers = detail::WorkerTeam::of_this_thread()) {
    std::atomic<std::int64_t> first{0};
    workers->run(threads, [&](int slot) {
      for (std::int64_t i; (i = first.fetch_add(1, std::memory_order_relaxed)) < count;) body(i, slot);
    });
    return;
  }
  std::int64_t next = 0;
  std::exception_ptr failure;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int slot = 0; slot < threads; ++slot) {
    for (;;) {
      std::int64_t i;
#pragma omp atomic capture
      i = next++;
      if (i >= count) break;
      try {
        body(i, slot);
      } catch (...) {
#pragma omp critical(tranche_parallel_tasks)
        failure = std::current_exception();
        break;
      }
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tranche::kernels::cpu
