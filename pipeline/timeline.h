#pragma once
/// The actions of a pipeline's stage, and the messages between stages, in the trace of a rank.

#include <string>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"
#include "tranche/core/trace.h"
#include "tranche/device/event.h"
#include "tranche/device/stream.h"
#include "tranche/engine/runtime.h"

namespace tranche::pipeline {

/// The times of the actions of one step or evaluation, as the compute stream passes them. On the track
/// "pipeline" each forward and backward is a span ("F3", "B3", "I3", "W3"), and so is the wait for a message
/// ("RECV_F3"). Where a rank has several chunks, their number stands in front ("2F3"). An arrow goes from the
/// forward or backward that made a message to the one that needs it.
class Timeline {
 public:
  /// `trace` and `schedule` outlive it.
  Timeline(TraceRecorder& trace, const Runtime& runtime, const PipelineSchedule& schedule);

  void begin(const Action& action, Stream& compute);
  void end(Stream& compute);
  /// Puts all into the trace, once the compute stream has passed it.
  void record();

 private:
  /// A point that the compute stream passes; without a time of its own where work is inline.
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
