#pragma once
/// Finds deadlocks: ranks of a pipeline that wait for each other's messages.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

class Places;

/// The rule for when a message between ranks waits.
enum class MessageModel : std::uint8_t {
  async,     ///< a send does not wait; a receive waits only for its own message
  channels,  ///< one queue for each sender, receiver and kind (residual or gradient), as on devices: messages
             ///< are received in the order in which they were sent, and a send delays only its own queue
  stream,    ///< one queue for all messages of a rank, in the order of its list: each ends together with the
             ///< other side on the other rank, and then the next one begins
};
/// "async", "channels", "stream".
std::string_view name_of(MessageModel model);
/// The reverse. Throws ConfigurationError listing the names.
MessageModel message_model_named(std::string_view name);

struct RankAction {
  int rank = 0;
  Action action;
  friend bool operator==(const RankAction&, const RankAction&) = default;
};

/// The ranks that wait for each other; empty when the schedule completes. Each rank in the cycle contributes
/// the action at which it waits, and a later one of its list for which the previous rank waits; the last rank
/// precedes the first. The schedule must be complete, with `places` of all its actions. The lists are fixed,
/// so completion does not depend on times: one simulation decides, in time linear in the number of actions.
std::vector<RankAction> find_cycle(const PipelineSchedule& schedule, const Places& places,
                                   MessageModel model);

/// "rank 1 waits for 0SEND_F2 of rank 0, which waits for 3SEND_B0 of rank 1: a cycle of 4 actions (model
/// stream): ..."
std::string text_of_cycle(const std::vector<RankAction>& cycle, MessageModel model);

}  // namespace tranche::pipeline
