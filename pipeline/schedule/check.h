#pragma once
/// Proves of a schedule that every run of it ends with the right gradients: before step 1, from integers
/// alone.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/schedule/deadlock.h"
#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// The things that a rank holds at once.
struct Held {
  std::int64_t activations = 0;  ///< pairs of chunk and micro-batch from F to B, or to W where B is split
  std::int64_t buffers = 0;      ///< messages from their receive to the action that reads them
  std::int64_t gathered = 0;     ///< chunks from GATHER to FREE
  friend bool operator==(const Held&, const Held&) = default;
};
/// The most that any rank may hold; none: as much as there is.
struct Limits {
  std::optional<std::int64_t> activations, buffers, gathered;
};

enum class Fault : std::uint8_t {
  none,
  misplaced,  ///< an action of a chunk, a micro-batch or a rank that does not have it
  twice,
  missing,
  order,      ///< an action stands before another one of its rank whose result it needs
  deadlock,   ///< ranks wait for each other
  gathering,  ///< weights are used, gathered or freed where they cannot be
  gradients,  ///< gradients of a chunk do not ascend in micro-batches: other bits
  limit,
};

struct Verdict {
  Fault fault = Fault::none;
  std::string refusal;  ///< names the schedule and the actions; empty when it is accepted
  /// The cycle of a deadlock (find_cycle()).
  std::vector<RankAction> cycle;
  std::vector<Held> most;  ///< the peaks of each rank, when it is accepted
  bool accepted() const { return fault == Fault::none; }
};

/// Checks a schedule that has its messages (with_messages()). It is accepted when
/// - each micro-batch has on each chunk F, and B or both I and W, once; each message has a send and a receive
///   once, on the ranks that hold the chunks, and chunks of one rank have none between them;
/// - each action stands behind what it needs on its rank;
/// - no ranks wait for each other under `model`;
/// - the input gradients and the weight gradients of each chunk ascend in micro-batches, so that all
///   schedules have equal bits;
/// - where there is a GATHER at all, each chunk is gathered while it computes, and computes before it is
///   freed;
/// - no rank holds more than `limits`.
/// The first of these that does not hold is the refusal. Takes time linear in the number of actions, whatever
/// the numbers in them. `name` is the file or the schedule in texts. Throws InvalidArgument when
/// `rank_of_chunk` names ranks that there are not.
Verdict check(const PipelineSchedule& lowered, MessageModel model, std::string_view name = "schedule",
              const Limits& limits = {});

/// Returns the schedule as the engine runs it: with messages where it has none (with_messages()). Throws
/// ConfigurationError with the refusal of check().
PipelineSchedule proved(PipelineSchedule schedule, MessageModel model, std::string_view name,
                        const Limits& limits = {});

}  // namespace tranche::pipeline
