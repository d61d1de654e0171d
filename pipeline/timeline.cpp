#include "pipeline/timeline.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "core/clock.h"
#include "tranche/partition/mesh.h"

namespace tranche::pipeline {

namespace {

constexpr const char* track = "pipeline";
/// An arrow begins and ends so far within its span, as viewers look for the span around it. Traces have
/// nanoseconds.
constexpr double inside = 2e-9;

}  // namespace

double Timeline::Mark::seconds() const {
  return passed.state() ? passed.passed_at() : issued;
}

Timeline::Mark Timeline::mark(Stream& compute) {
  return {compute.record(), detail::seconds_now()};
}

Timeline::Timeline(TraceRecorder& trace, const Runtime& runtime, const Engine::StageUses& stage)
    : trace_(trace), stage_(stage), ranks_(runtime.mesh().group({MeshAxis::pipeline}, runtime.rank())) {}

void Timeline::begin(const Action& action, Stream& compute) {
  spans_.push_back({action, mark(compute), {}});
}

void Timeline::end(Stream& compute) {
  spans_.back().ended = mark(compute);
}

void Timeline::arrow(const Span& span, bool residual, bool begins) {
  const double begun = span.begun.seconds(), ended = span.ended.seconds();
  // A rank sends residuals on one channel and gradients on another; both ends count messages alike.
  const int sender = ranks_.at(static_cast<std::size_t>(stage_.stage - (begins ? 0 : residual ? 1 : -1)));
  trace_.arrow(track,
               (residual ? "residual of micro-batch " : "gradient of micro-batch ") +
                   std::to_string(span.action.micro_batch),
               2 * sender + (residual ? 0 : 1), begins,
               begins ? std::max(begun, ended - inside) : std::min(ended, begun + inside));
}

void Timeline::record() {
  if (spans_.empty()) return;
  spans_.back().ended.passed.wait();
  for (const Span& span : std::exchange(spans_, {})) {
    const ActionKind kind = span.action.kind;
    if (kind == ActionKind::send_residual || kind == ActionKind::send_gradient) continue;
    trace_.span(track, span.action.name(), span.begun.seconds(), span.ended.seconds());
    const bool forward = kind == ActionKind::forward;
    if (!forward && kind != ActionKind::backward) continue;
    // Forward takes a residual from the stage in front, backward a gradient from the one behind.
    if (forward ? !stage_.first() : !stage_.last()) arrow(span, forward, false);
    if (forward ? !stage_.last() : !stage_.first()) arrow(span, forward, true);
  }
}

}  // namespace tranche::pipeline
