#pragma once
/// Runs a schedule with a thread for each rank and mailboxes between them, to find out how it ends. Shares no
/// code with the checker.

#include <cstdint>
#include <string>

#include "pipeline/schedule/check.h"
#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::test {

enum class Outcome : std::uint8_t {
  trained,  ///< every rank came to its end, and the gradients of all chunks are those of one rank
  hung,     ///< all ranks that had not ended waited
  broken,   ///< an action had no operand or one too many, or the gradients are others
};

struct Ending {
  Outcome outcome = Outcome::trained;
  std::string why;  ///< the reason, when it is broken
};

/// Numbers stand for tensors: each chunk mixes what it gets with a weight of its own, so that another order
/// of the sum of weight gradients gives another number. Messages behave as `model` says. No clock: a run
/// hangs as soon as each rank that has not ended waits for something that only another one could do.
Ending run_by_threads(const pipeline::PipelineSchedule& schedule, pipeline::MessageModel model);

}  // namespace tranche::test
