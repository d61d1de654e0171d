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
/// The distance of an arrow's ends from the borders of its span, because viewers search for the span around
/// an end. Traces have a resolution of nanoseconds.
constexpr double inside = 2e-9;

}  // namespace

double Timeline::Mark::seconds() const {
  return passed.state() ? passed.passed_at() : issued;
}

Timeline::Mark Timeline::mark(Stream& compute) {
  return {compute.record(), detail::seconds_now()};
}

Timeline::Timeline(TraceRecorder& trace, const Runtime& runtime, const PipelineSchedule& schedule)
    : trace_(trace),
      schedule_(schedule),
      ranks_(runtime.mesh().group({MeshAxis::pipeline}, runtime.rank())) {}

void Timeline::begin(const Action& action, Stream& compute) {
  spans_.push_back({action, mark(compute), {}});
}

void Timeline::end(Stream& compute) {
  spans_.back().ended = mark(compute);
}

void Timeline::arrow(const Span& span, bool residual, bool begins) {
  const double begun = span.begun.seconds(), ended = span.ended.seconds();
  // Each chunk has one channel for residuals and one for gradients. Sender and receiver number messages by
  // micro-batch, so their numbers agree.
  const int chunk = span.action.chunk - (begins ? 0 : residual ? 1 : -1);
  const int stage = schedule_.rank_of_chunk.at(static_cast<std::size_t>(chunk));
  const int sender = ranks_.at(static_cast<std::size_t>(stage)) * schedule_.chunks() + chunk;
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
    if (kind == ActionKind::gather || kind == ActionKind::free) continue;
    trace_.span(track, schedule_.name_of(span.action), span.begun.seconds(), span.ended.seconds());
    const bool forward = kind == ActionKind::forward;
    if (!forward && kind != ActionKind::backward && kind != ActionKind::input_gradient) continue;
    // Forward receives a residual from the chunk before, backward a gradient from the chunk after.
    const int chunk = span.action.chunk;
    const bool crosses_before = chunk > 0 && schedule_.crosses(chunk - 1);
    const bool crosses_behind = schedule_.crosses(chunk);
    if (forward ? crosses_before : crosses_behind) arrow(span, forward, false);
    if (forward ? crosses_behind : crosses_before) arrow(span, forward, true);
  }
}

}  // namespace tranche::pipeline
