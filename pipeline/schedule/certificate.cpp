#include "pipeline/schedule/certificate.h"

#include <vector>

namespace tranche::pipeline {

Certificate lower_bounds(const PipelineSchedule& schedule, const StageTimes& times) {
  times.require(schedule.ranks.size());
  const StageTimes chunk = times.by_chunk(schedule.rank_of_chunk);
  const std::size_t chunks = schedule.rank_of_chunk.size(), ranks = schedule.ranks.size();
  const auto micro_batches = static_cast<double>(schedule.micro_batches);
  std::vector<bool> split(chunks, false);
  for (const std::vector<Action>& line : schedule.ranks) {
    for (const Action& action : line) {
      if (action.kind == ActionKind::weight_gradient) split.at(static_cast<std::size_t>(action.chunk)) = true;
    }
  }
  Certificate certificate;
  std::vector<double> earliest(ranks, -1), work(ranks, 0), least_tail(ranks, -1);
  double head = 0;  // the forward passes of the chunks before this one
  double way_back =
      0;  // from a chunk's input gradient to the end of the micro-batch, without the chunk's own W
  for (std::size_t c = 0; c < chunks; ++c) {
    const auto rank = static_cast<std::size_t>(schedule.rank_of_chunk[c]);
    const double own_weight = split[c] ? chunk.weight[c] : 0,
                 gradient = chunk.input[c] + (split[c] ? 0 : chunk.weight[c]);
    // A rank's last action may be a weight gradient. Otherwise it is the backward of its first chunk.
    const double tail = split[c] ? 0 : way_back;
    if (earliest[rank] < 0) earliest[rank] = head;
    least_tail[rank] = least_tail[rank] < 0 ? tail : std::min(least_tail[rank], tail);
    work[rank] += micro_batches * (chunk.forward[c] + chunk.input[c] + chunk.weight[c]);
    const double after = std::max(way_back, own_weight);
    certificate.by_path =
        std::max(certificate.by_path, head + micro_batches * (chunk.forward[c] + gradient) + after);
    head += chunk.forward[c];
    way_back = gradient + after;
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    certificate.by_rank = std::max(certificate.by_rank, earliest[rank] + work[rank] + least_tail[rank]);
  }
  return certificate;
}

}  // namespace tranche::pipeline
