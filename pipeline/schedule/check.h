#pragma once
/// Proves, before step 1 and from integers alone, that every run of a schedule ends with the right gradients.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/schedule/deadlock.h"
#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// Counts of what a rank holds at once.
struct Held {
  std::int64_t activations = 0;  ///< pairs of chunk and micro-batch, from F to B, or to W if B is split
  std::int64_t buffers = 0;      ///< received messages, from the receive to the action that reads them
  std::int64_t gathered = 0;     ///< chunks from GATHER to FREE
  friend bool operator==(const Held&, const Held&) = default;
};
/// The most that any rank may hold; nullopt: unlimited.
struct Limits {
  std::optional<std::int64_t> activations, buffers, gathered;
};

enum class Fault : std::uint8_t {
  none,
  misplaced,  ///< an action on a chunk, micro-batch or rank that it does not belong to
  twice,
  missing,
  order,      ///< an action precedes another one of its rank whose result it needs
  deadlock,   ///< ranks wait for each other
  gathering,  ///< weights are used, gathered or freed when this is impossible
  gradients,  ///< gradients of a chunk are not added in ascending micro-batches, which changes bits
  limit,
};

struct Verdict {
  Fault fault = Fault::none;
  std::string refusal;  ///< names the schedule and the actions; empty if it is accepted
  /// The cycle of a deadlock (find_cycle()).
  std::vector<RankAction> cycle;
  std::vector<Held> most;  ///< the peaks of each rank, if it is accepted
  bool accepted() const { return fault == Fault::none; }
};

/// Checks a schedule that has its messages (with_messages()). It is accepted when
/// - each micro-batch has on each chunk exactly one F, and either one B or one I and one W; each message has
///   exactly one send and one receive, on the ranks of its chunks, and chunks of one rank have no messages
///   between them;
/// - each action follows the actions of its rank that it needs;
/// - no ranks wait for each other under `model`;
/// - the input gradients and the weight gradients of each chunk ascend in micro-batches, so that all
///   schedules have equal bits;
/// - each chunk is gathered while it computes, and computes before it is freed, if there is any GATHER;
/// - no rank holds more than `limits`.
/// The refusal is the first of these that fails. Takes time linear in the number of actions, whatever numbers
/// they contain. Texts name the file or schedule as `name`. Throws InvalidArgument when `rank_of_chunk`
/// contains ranks that do not exist.
Verdict check(const PipelineSchedule& lowered, MessageModel model, std::string_view name = "schedule",
              const Limits& limits = {});

/// Returns the schedule that the engine runs: with messages, which are added if there are none
/// (with_messages()). Throws ConfigurationError with the refusal of check().
PipelineSchedule proved(PipelineSchedule schedule, MessageModel model, std::string_view name,
                        const Limits& limits = {});

}  // namespace tranche::pipeline
