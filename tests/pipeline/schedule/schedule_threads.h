#pragma once
/// Executes a schedule with a thread for each rank and mailboxes between them, to find out how it ends. It
/// shares no code with the checker.

#include <cstdint>
#include <string>

#include "pipeline/schedule/check.h"
#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::test {

enum class Outcome : std::uint8_t {
  trained,  ///< every rank ended, and the gradients of all chunks are those of one rank
  hung,     ///< all remaining ranks waited for each other
  broken,   ///< an action had no operand or one too many, or the gradients are wrong
};

struct Ending {
  Outcome outcome = Outcome::trained;
  std::string why;  ///< the reason if it is broken
};

/// Numbers represent tensors. Each chunk mixes its input with a weight of its own, so that another order of
/// the sum of weight gradients gives another number. Messages behave as `model` specifies. No clock is used:
/// a run hangs as soon as every remaining rank waits for an action of another.
Ending run_by_threads(const pipeline::PipelineSchedule& schedule, pipeline::MessageModel model);

}  // namespace tranche::test
