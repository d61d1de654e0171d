#include "pipeline/schedule/pipeline_schedule.h"

#include <array>

#include "tranche/core/error.h"

namespace tranche::pipeline {

std::string_view letters_of(ActionKind kind) {
  constexpr std::array<std::string_view, 10> letters{"F",      "B",      "I",      "W",      "SEND_F",
                                                     "RECV_F", "SEND_B", "RECV_B", "GATHER", "FREE"};
  return letters[static_cast<std::size_t>(kind)];
}

bool computes(ActionKind kind) {
  return kind == ActionKind::forward || kind == ActionKind::backward || kind == ActionKind::input_gradient ||
         kind == ActionKind::weight_gradient;
}

bool is_message(ActionKind kind) {
  return sends(kind) || receives(kind);
}
bool sends(ActionKind kind) {
  return kind == ActionKind::send_residual || kind == ActionKind::send_gradient;
}
bool receives(ActionKind kind) {
  return kind == ActionKind::receive_residual || kind == ActionKind::receive_gradient;
}

std::string Action::name() const {
  std::string text = std::to_string(chunk) + std::string(letters_of(kind));
  return computes(kind) || is_message(kind) ? text + std::to_string(micro_batch) : text;
}

std::string PipelineSchedule::name_of(const Action& action) const {
  const std::string name = action.name();
  return several_chunks() ? name : name.substr(name.find_first_not_of("0123456789"));
}

Action partner(const Action& message) {
  switch (message.kind) {
    case ActionKind::send_residual:
      return {ActionKind::receive_residual, message.chunk + 1, message.micro_batch};
    case ActionKind::receive_residual:
      return {ActionKind::send_residual, message.chunk - 1, message.micro_batch};
    case ActionKind::send_gradient:
      return {ActionKind::receive_gradient, message.chunk - 1, message.micro_batch};
    case ActionKind::receive_gradient:
      return {ActionKind::send_gradient, message.chunk + 1, message.micro_batch};
    default:
      throw InvalidArgument(message.name() + " is no message");
  }
}

std::vector<int> ranks_of_chunks(ChunkPlacement placement, int stages, int chunks_per_rank) {
  if (stages < 1 || chunks_per_rank < 1) {
    throw InvalidArgument("a pipeline of " + std::to_string(stages) + " stages with " +
                          std::to_string(chunks_per_rank) + " chunks on a rank: both have to be at least 1");
  }
  if (placement == ChunkPlacement::v && chunks_per_rank != 2) {
    throw InvalidArgument("chunks in the shape of a V lie two on a rank, not " +
                          std::to_string(chunks_per_rank));
  }
  std::vector<int> ranks;
  ranks.reserve(static_cast<std::size_t>(stages) * static_cast<std::size_t>(chunks_per_rank));
  for (int round = 0; round < chunks_per_rank; ++round) {
    for (int i = 0; i < stages; ++i) {
      ranks.push_back(placement == ChunkPlacement::v && round == 1 ? stages - 1 - i : i);
    }
  }
  return ranks;
}

}  // namespace tranche::pipeline
