#include "pipeline/schedule/simulate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::pipeline {

namespace {

constexpr double not_yet = -1;

/// Runs the lists of all ranks, each until it must wait for another.
class Run {
 public:
  Run(const PipelineSchedule& schedule, const StageTimes& times)
      : schedule_(&schedule), chunk_times_(times.by_chunk(schedule.rank_of_chunk)) {
    for (std::vector<double>& ends : ends_) ends.assign(pairs(), not_yet);
    place_.assign(schedule.ranks.size(), 0);
    now_.assign(schedule.ranks.size(), 0);
    for (const std::vector<Action>& line : schedule.ranks) spans.emplace_back(line.size());
  }

  std::vector<std::vector<Span>> spans;

  void to_the_end() {
    std::vector<int> ready;
    for (int rank = schedule_->stages() - 1; rank >= 0; --rank) ready.push_back(rank);
    while (!ready.empty()) {
      const int rank = ready.back();
      ready.pop_back();
      advance(rank, ready);
    }
    for (int rank = 0; rank < schedule_->stages(); ++rank) {
      const std::vector<Action>& line = schedule_->ranks[static_cast<std::size_t>(rank)];
      const std::size_t at = place_[static_cast<std::size_t>(rank)];
      if (at < line.size()) {
        throw InvalidArgument("the schedule does not come to its end: rank " + std::to_string(rank) +
                              " waits at " + line[at].name() + " for ever");
      }
    }
  }

 private:
  std::size_t pairs() const {
    const auto chunks = static_cast<std::size_t>(schedule_->chunks()),
               micro_batches = static_cast<std::size_t>(schedule_->micro_batches);
    std::size_t actions = 0;
    for (const std::vector<Action>& line : schedule_->ranks) actions += line.size();
    if (chunks != 0 && micro_batches > actions / chunks) {
      throw InvalidArgument(std::to_string(actions) + " actions cannot be a schedule of " +
                            std::to_string(micro_batches) + " micro-batches on " + std::to_string(chunks) +
                            " chunks");
    }
    return chunks * micro_batches;
  }
  double& end_of(ActionKind kind, int chunk, std::int64_t micro_batch) {
    return ends_[static_cast<std::size_t>(kind)]
                [static_cast<std::size_t>(chunk) * static_cast<std::size_t>(schedule_->micro_batches) +
                 static_cast<std::size_t>(micro_batch)];
  }
  /// The end time of the input gradient, which may be part of a whole backward.
  double gradient_end(int chunk, std::int64_t micro_batch) {
    return std::max(end_of(ActionKind::backward, chunk, micro_batch),
                    end_of(ActionKind::input_gradient, chunk, micro_batch));
  }
  /// The time at which the inputs of an action are available; not_yet if that is still unknown.
  double ready_at(const Action& action) {
    const int chunk = action.chunk;
    const std::int64_t m = action.micro_batch;
    switch (action.kind) {
      case ActionKind::forward:
        return chunk == 0 ? 0 : end_of(ActionKind::forward, chunk - 1, m);
      case ActionKind::backward:
      case ActionKind::input_gradient: {
        const double forward = end_of(ActionKind::forward, chunk, m);
        if (forward < 0 || !schedule_->has_next(chunk)) return forward;
        const double gradient = gradient_end(chunk + 1, m);
        return gradient < 0 ? not_yet : std::max(forward, gradient);
      }
      case ActionKind::weight_gradient:
        return end_of(ActionKind::input_gradient, chunk, m);
      case ActionKind::send_residual:
        return end_of(ActionKind::forward, chunk, m);
      case ActionKind::send_gradient:
        return gradient_end(chunk, m);
      case ActionKind::receive_residual:
        return chunk == 0 ? not_yet : end_of(ActionKind::send_residual, chunk - 1, m);
      case ActionKind::receive_gradient:
        return schedule_->has_next(chunk) ? end_of(ActionKind::send_gradient, chunk + 1, m) : not_yet;
      default:
        return 0;
    }
  }
  double duration(const Action& action) const {
    const auto chunk = static_cast<std::size_t>(action.chunk);
    switch (action.kind) {
      case ActionKind::forward:
        return chunk_times_.forward[chunk];
      case ActionKind::backward:
        return chunk_times_.input[chunk] + chunk_times_.weight[chunk];
      case ActionKind::input_gradient:
        return chunk_times_.input[chunk];
      case ActionKind::weight_gradient:
        return chunk_times_.weight[chunk];
      default:
        return 0;
    }
  }
  void advance(int rank, std::vector<int>& ready) {
    const auto at_rank = static_cast<std::size_t>(rank);
    const std::vector<Action>& line = schedule_->ranks[at_rank];
    for (std::size_t& at = place_[at_rank]; at < line.size(); ++at) {
      const Action& action = line[at];
      if (action.chunk < 0 || action.chunk >= schedule_->chunks() || action.micro_batch < 0 ||
          action.micro_batch >= schedule_->micro_batches) {
        throw InvalidArgument(action.name() + " is no action of " + std::to_string(schedule_->chunks()) +
                              " chunks and " + std::to_string(schedule_->micro_batches) + " micro-batches");
      }
      const double there = ready_at(action);
      if (there < 0) return;
      const double start = std::max(now_[at_rank], there), end = start + duration(action);
      spans[at_rank][at] = {start, end};
      now_[at_rank] = end;
      if (action.kind == ActionKind::gather || action.kind == ActionKind::free) continue;
      end_of(action.kind, action.chunk, action.micro_batch) = end;
      const bool forward = action.kind == ActionKind::forward || action.kind == ActionKind::send_residual;
      const int reader = forward ? action.chunk + 1 : action.chunk - 1;
      if (reader >= 0 && reader < schedule_->chunks()) {
        const int other = schedule_->rank_of_chunk[static_cast<std::size_t>(reader)];
        if (other != rank) ready.push_back(other);
      }
    }
  }

  const PipelineSchedule* schedule_;
  StageTimes chunk_times_;
  /// The end time of each action: a list for each kind, by chunk and micro-batch.
  std::array<std::vector<double>, static_cast<std::size_t>(ActionKind::gather)> ends_;
  std::vector<std::size_t> place_;  ///< the next action of each rank
  std::vector<double> now_;
};

RankTimes times_of(const std::vector<Action>& line, const std::vector<Span>& spans, double length) {
  RankTimes times;
  double first = length, last = 0;
  for (std::size_t at = 0; at < line.size(); ++at) {
    if (!computes(line[at].kind)) continue;
    first = std::min(first, spans[at].start);
    last = std::max(last, spans[at].end);
    times.busy += spans[at].end - spans[at].start;
  }
  times.start_up = first;
  times.cool_down = length - std::max(first, last);
  times.bubble = std::max(0.0, length - times.busy - times.start_up - times.cool_down);
  return times;
}

}  // namespace

StageTimes StageTimes::equal(int stages, double forward, double input, double weight) {
  const auto count = static_cast<std::size_t>(stages);
  return {std::vector<double>(count, forward), std::vector<double>(count, input),
          std::vector<double>(count, weight)};
}

void StageTimes::require(std::size_t stages) const {
  for (const std::vector<double>* list : {&forward, &input, &weight}) {
    if (list->size() != stages) {
      throw InvalidArgument(std::to_string(list->size()) + " times for " + std::to_string(stages) +
                            " stages");
    }
    if (std::any_of(list->begin(), list->end(),
                    [](double time) { return !(time >= 0) || !std::isfinite(time); })) {
      throw InvalidArgument("a time of a stage is negative or not finite");
    }
  }
}

StageTimes StageTimes::by_chunk(const std::vector<int>& rank_of_chunk) const {
  std::vector<int> chunks(forward.size(), 0);
  for (const int rank : rank_of_chunk) ++chunks.at(static_cast<std::size_t>(rank));
  StageTimes parts;
  for (const int rank : rank_of_chunk) {
    const auto at = static_cast<std::size_t>(rank);
    parts.forward.push_back(forward.at(at) / chunks[at]);
    parts.input.push_back(input.at(at) / chunks[at]);
    parts.weight.push_back(weight.at(at) / chunks[at]);
  }
  return parts;
}

Simulation simulate(const PipelineSchedule& schedule, const StageTimes& times) {
  times.require(schedule.ranks.size());
  Run run(schedule, times);
  run.to_the_end();
  Simulation result;
  result.spans = std::move(run.spans);
  for (const std::vector<Span>& line : result.spans) {
    for (const Span& span : line) result.length = std::max(result.length, span.end);
  }
  double busy = 0;
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    result.ranks.push_back(times_of(schedule.ranks[rank], result.spans[rank], result.length));
    busy += result.ranks.back().busy;
  }
  if (result.length > 0) result.utilization = busy / (result.length * static_cast<double>(schedule.stages()));
  result.peak_activations = peak_activations(schedule);
  return result;
}

std::vector<std::int64_t> peak_activations(const PipelineSchedule& schedule) {
  std::vector<std::int64_t> peaks;
  for (const std::vector<Action>& line : schedule.ranks) {
    std::int64_t open = 0, most = 0;
    for (const Action& action : line) {
      if (action.kind == ActionKind::forward) most = std::max(most, ++open);
      if (action.kind == ActionKind::backward || action.kind == ActionKind::weight_gradient) --open;
    }
    peaks.push_back(most);
  }
  return peaks;
}

}  // namespace tranche::pipeline
