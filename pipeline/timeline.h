#pragma once
/// Records a stage's actions, and the messages between stages, in the rank's trace.

#include <string>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"
#include "tranche/core/trace.h"
#include "tranche/device/event.h"
#include "tranche/device/stream.h"
#include "tranche/engine/runtime.h"

namespace tranche::pipeline {

/// The times at which the compute stream passes the actions of one step or evaluation. On the track
/// "pipeline" each forward and backward is a span ("F3", "B3", "I3", "W3"), and so is the wait for a message
/// ("RECV_F3"). If a rank has several chunks, the names begin with the chunk's number ("2F3"). An arrow leads
/// from the forward or backward that produced a message to the one that needs it.
class Timeline {
 public:
  /// `trace` and `schedule` must outlive it.
  Timeline(TraceRecorder& trace, const Runtime& runtime, const PipelineSchedule& schedule);

  void begin(const Action& action, Stream& compute);
  void end(Stream& compute);
  /// Adds all spans to the trace, after the compute stream has passed them.
  void record();

 private:
  /// A point of the compute stream; if work is inline, the event has no time and `issued` is used.
  struct Mark {
    Event passed;
    double issued = 0;
    double seconds() const;
  };
  struct Span {
    Action action;
    Mark begun, ended;
  };
  static Mark mark(Stream& compute);
  void arrow(const Span& span, bool residual, bool begins);

  TraceRecorder& trace_;
  const PipelineSchedule& schedule_;
  std::vector<int> ranks_;  ///< of the stages, in order
  std::vector<Span> spans_;
};

}  // namespace tranche::pipeline
