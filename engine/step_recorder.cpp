#include "engine/step_recorder.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/clock.h"

namespace tranche::detail {

namespace {

const char* name_of(Program program) {
  return program == Program::train ? "train" : program == Program::evaluate ? "evaluate" : "infer";
}

}  // namespace

StepRecorder::StepRecorder(StepArena& arena, Stream& compute, bool plan_memory)
    : arena_(arena),
      plan_memory_(plan_memory),
      exposed_(compute),
      pass_times_(compute),
      step_started_(seconds_now()),
      step_ended_(step_started_) {}

void StepRecorder::begin_pass(Program program, const Shape& shape) {
  std::int64_t& passes = passes_[static_cast<std::size_t>(program)];
  const bool record = plan_memory_ && passes == 1;
  if (host_copies_ != nullptr) host_copies_->begin_pass(name_of(program), record, shape);
  arena_.begin(name_of(program), record, shape);
  // A training pass is counted once its step is complete.
  if (program != Program::train) ++passes;
}

void StepRecorder::next_micro_batch(const Shape& shape) {
  if (host_copies_ != nullptr) host_copies_->next_micro_batch(shape);
  arena_.also(shape);
}

bool StepRecorder::take_repacked() {
  return std::exchange(packings_, arena_.packings()) != packings_;
}

void StepRecorder::end_pass() {
  if (host_copies_ != nullptr) host_copies_->end_pass();
  arena_.end();
}

void StepRecorder::abandon_pass(Program program) {
  if (host_copies_ != nullptr) host_copies_->abandon_pass();
  arena_.abandon();
  passes_[static_cast<std::size_t>(program)] = 0;
}

void StepRecorder::forget_passes() {
  arena_.forget();  // throws while memory of a pass is held, before anything has changed
  if (host_copies_ != nullptr) host_copies_->forget();
  // Orders of units stay valid, so the next pass of each program is recorded and packed.
  for (std::int64_t& passes : passes_) passes = std::min<std::int64_t>(passes, 1);
}

void StepRecorder::begin_step(std::span<Communicator* const> groups) {
  step_started_ = seconds_now();
  between_steps_ = step_started_ - step_ended_;
  traffic_.begin(groups);
}

void StepRecorder::end_step(std::span<Communicator* const> groups, StepResult& result) {
  ++passes_[static_cast<std::size_t>(Program::train)];
  exposed_.settle();
  std::tie(result.forward_seconds, result.backward_seconds) = pass_times_.take();
  result.exposed_gather_seconds = exposed_.take(Exposed::gather);
  result.exposed_reduce_seconds = exposed_.take(Exposed::reduce);
  result.exposed_offload_seconds = exposed_.take(Exposed::offload);
  result.exposed_message_seconds = exposed_.take(Exposed::message);
  traffic_.end(groups);
}

void StepRecorder::stamp(StepResult& result, double update_began) {
  step_ended_ = seconds_now();
  result.seconds = step_ended_ - step_started_;
  result.between_seconds = between_steps_;
  result.update_seconds = step_ended_ - update_began;
}

void StepRecorder::clear_times() {
  exposed_.clear();
  pass_times_.clear();
}

}  // namespace tranche::detail
