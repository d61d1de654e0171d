#pragma once
/// Schedules of a pipeline: for each rank a list of what it computes and which messages it sends and
/// receives. Integers only; no device, no communicator.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::pipeline {

/// Forward and backward of a stage's layers for one micro-batch, and the messages with its neighbours. The
/// residual goes to the stage behind, its gradient to the stage in front.
enum class ActionKind : std::uint8_t {
  forward,
  backward,
  send_residual,
  receive_residual,
  send_gradient,
  receive_gradient
};

struct Action {
  ActionKind kind = ActionKind::forward;
  std::int64_t micro_batch = 0;
  /// "F3", "B3", "SEND_F3", "RECV_F3", "SEND_B3", "RECV_B3".
  std::string name() const;
  friend bool operator==(const Action&, const Action&) = default;
};

enum class ScheduleKind : std::uint8_t {
  afab,           ///< all forward, all backward (GPipe): as many micro-batches are open as a step has
  one_f_one_b,    ///< 1F1B (PipeDream-Flush): as many are open as there are stages from this one on
  forward_alone,  ///< evaluation: no backward
};
/// "afab", "1f1b".
std::string_view name_of(ScheduleKind kind);

/// The actions of one stage in order. Each micro-batch has one forward and, but for forward_alone, one
/// backward; a receive stands in front of the action that reads it, a send behind the one that made it.
/// Backward passes ascend in micro-batches. Throws InvalidArgument for a stage that does not exist or numbers
/// below 1.
std::vector<Action> actions_of(ScheduleKind kind, int stages, std::int64_t micro_batches, int stage);

/// The most micro-batches of a stage that are open at once.
std::int64_t open_at_once(const std::vector<Action>& actions);

}  // namespace tranche::pipeline
