#pragma once
/// The range of schedules that tests use.

#include <cstdint>
#include <string>

#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline::test {

/// Calls `work(name, schedule, p, m, v)` for every named schedule with 1 to `most_stages` stages, 1 to
/// `most_micro_batches` micro-batches and, if the number is free, 1 to `most_chunks` chunks per rank.
template <typename Work>
void for_every_schedule(int most_stages, int most_micro_batches, int most_chunks, Work work) {
  for (const NamedSchedule& named : named_schedules()) {
    const std::string name(named.name);
    for (int p = 1; p <= most_stages; ++p) {
      for (int m = 1; m <= most_micro_batches; ++m) {
        if (name == "interleaved" && m % p != 0) continue;
        const int least = named.any_chunks ? 1 : named.chunks_per_rank;
        const int most = named.any_chunks ? most_chunks : named.chunks_per_rank;
        for (int v = least; v <= most; ++v) work(name, generate(name, p, m, v), p, m, v);
      }
    }
  }
}

}  // namespace tranche::pipeline::test
