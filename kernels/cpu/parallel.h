#pragma once
/// Loops over the host threads of a stream: the calling thread's worker team if it has one, or OpenMP's.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "device/worker_team.h"

namespace tranche::kernels::cpu {

/// Below this many elements a second thread costs more than it saves (a team starts in microseconds).
inline constexpr std::int64_t parallel_grain = 32768;

inline constexpr int parts_of_a_thread = 4;

/// The number of rows of `columns` elements in a grain.
constexpr std::int64_t row_grain(std::int64_t columns) {
  return std::max<std::int64_t>(1, parallel_grain / std::max<std::int64_t>(1, columns));
}

/// The columns that a thread takes where threads share columns: its whole share, because a few columns of
/// every row are read a cache line at a time and never prefetched; whole lines, and at least `least`.
constexpr std::int64_t column_grain(int threads, std::int64_t columns, std::int64_t least) {
  constexpr std::int64_t line = 64;
  const std::int64_t share = (columns + std::max(1, threads) - 1) / std::max(1, threads);
  return (std::max({share, least, std::int64_t{1}}) + line - 1) / line * line;
}

/// True when a result of so many bytes is written by non-temporal stores, past the caches: it exceeds what
/// they keep for its reader, consists of whole lines, and overwrites none of `operands`, whose lines are in
/// the caches.
inline bool is_streamed(const void* to, std::int64_t bytes, std::initializer_list<const void*> operands) {
  constexpr std::int64_t least = std::int64_t{32} << 20;
  constexpr std::uintptr_t line = 64;
  return bytes >= least && reinterpret_cast<std::uintptr_t>(to) % line == 0 &&
         std::find(operands.begin(), operands.end(), to) == operands.end();
}

/// Calls body(first, count) so that [0, total) is covered once, in ranges of `grain` (the last may be
/// shorter) if several threads run and in one range otherwise: the body's result must not depend on it.
template <class Body>
void parallel_ranges(int threads, std::int64_t total, std::int64_t grain, const Body& body) {
  const std::int64_t ranges = (total + grain - 1) / grain;
  if (threads <= 1 || ranges <= 1) {
    if (total > 0) body(std::int64_t{0}, total);
    return;
  }
  const int team = static_cast<int>(std::min<std::int64_t>(threads, ranges));
  if (detail::WorkerTeam* workers = detail::WorkerTeam::of_this_thread()) {
    // There are several parts per thread, so that a thread that is not scheduled leaves its share to the
    // others.
    const auto parts =
        static_cast<int>(std::min<std::int64_t>(ranges, std::int64_t{team} * parts_of_a_thread));
    workers->run(parts, [&](int part) {
      const std::int64_t end = (part + 1) * ranges / parts;
      for (std::int64_t range = part * ranges / parts; range < end; ++range) {
        body(range * grain, std::min(grain, total - range * grain));
      }
    });
    return;
  }
#pragma omp parallel for num_threads(team) schedule(static)
  for (std::int64_t range = 0; range < ranges; ++range) {
    body(range * grain, std::min(grain, total - range * grain));
  }
}

}  // namespace tranche::kernels::cpu
