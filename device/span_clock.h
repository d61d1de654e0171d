#pragma once
#include "core/clock.h"

namespace tranche::detail {

/// The clock for an inline stream's spans and recorded work, kept with the stream (Stream::attachment).
/// Measurements on shared machines set it to processor seconds; other tracks of the trace keep using
/// seconds_now().
struct SpanClock {
  double (*now)() = &seconds_now;
};

}  // namespace tranche::detail
