#include "pipeline/schedule/schedule.h"

#include <algorithm>
#include <array>

#include "tranche/core/error.h"

namespace tranche::pipeline {

std::string Action::name() const {
  constexpr std::array<std::string_view, 6> names{"F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"};
  return std::string(names[static_cast<std::size_t>(kind)]) + std::to_string(micro_batch);
}

std::string_view name_of(ScheduleKind kind) {
  constexpr std::array<std::string_view, 3> names{"afab", "1f1b", "forward"};
  return names[static_cast<std::size_t>(kind)];
}

std::vector<Action> actions_of(ScheduleKind kind, int stages, std::int64_t micro_batches, int stage) {
  if (stages < 1 || micro_batches < 1 || stage < 0 || stage >= stages) {
    throw InvalidArgument("stage " + std::to_string(stage) + " of " + std::to_string(stages) + " with " +
                          std::to_string(micro_batches) + " micro-batches");
  }
  std::vector<Action> actions;
  const bool first = stage == 0, last = stage + 1 == stages;
  const auto forward = [&](std::int64_t m) {
    if (!first) actions.push_back({ActionKind::receive_residual, m});
    actions.push_back({ActionKind::forward, m});
    if (!last) actions.push_back({ActionKind::send_residual, m});
  };
  const auto backward = [&](std::int64_t m) {
    if (!last) actions.push_back({ActionKind::receive_gradient, m});
    actions.push_back({ActionKind::backward, m});
    if (!first) actions.push_back({ActionKind::send_gradient, m});
  };
  // Forward passes before the first backward: as far as the last stage's first gradient takes to come back.
  const std::int64_t ahead = kind == ScheduleKind::one_f_one_b
                                 ? std::min<std::int64_t>(stages - 1 - stage, micro_batches)
                                 : micro_batches;
  for (std::int64_t m = 0; m < ahead; ++m) forward(m);
  if (kind == ScheduleKind::forward_alone) return actions;
  for (std::int64_t m = 0; m < micro_batches; ++m) {
    if (ahead + m < micro_batches) forward(ahead + m);
    backward(m);
  }
  return actions;
}

std::int64_t open_at_once(const std::vector<Action>& actions) {
  std::int64_t open = 0, most = 0;
  for (const Action& action : actions) {
    if (action.kind == ActionKind::forward) most = std::max(most, ++open);
    if (action.kind == ActionKind::backward) --open;
  }
  return most;
}

}  // namespace tranche::pipeline
