#pragma once
/// Ranks of a pipeline that wait for each other's messages for ever.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

class Places;

/// The rule by which messages between ranks wait.
enum class MessageModel : std::uint8_t {
  async,     ///< a send waits for nothing; a receive waits for its own message
  channels,  ///< a queue for each sender, receiver and kind (residual or gradient), as devices have: messages
             ///< are received in the order in which they were sent; a send holds up its own queue alone
  stream,    ///< one queue for all messages of a rank, in the order of its list: each ends together with its
             ///< partner on the other rank, and the next one begins then
};
/// "async", "channels", "stream".
std::string_view name_of(MessageModel model);
/// The reverse. Throws ConfigurationError, which lists the names.
MessageModel message_model_named(std::string_view name);

struct RankAction {
  int rank = 0;
  Action action;
  friend bool operator==(const RankAction&, const RankAction&) = default;
};

/// The ranks that wait for each other; empty when the schedule comes to its end. Each rank in the cycle adds
/// the action at which it stands, and a later one of its list for which the rank before it waits; the last
/// rank is before the first. A complete schedule is asked for, with `places` of all its actions. Ranks are
/// fixed lists, so whether a run ends does not depend on times: one run decides, in time linear in the
/// actions.
std::vector<RankAction> find_cycle(const PipelineSchedule& schedule, const Places& places,
                                   MessageModel model);

/// "rank 1 waits for 0SEND_F2 of rank 0, which waits for 3SEND_B0 of rank 1: a cycle of 4 actions (model
/// stream): ..."
std::string text_of_cycle(const std::vector<RankAction>& cycle, MessageModel model);

}  // namespace tranche::pipeline
