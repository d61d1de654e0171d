#pragma once
#include "core/clock.h"

namespace tranche::detail {

/// The clock that an inline stream's spans and recorded work are taken by, kept with the stream
/// (Stream::attachment). Measurements on shared machines put processor seconds here; other tracks of the
/// trace stay with seconds_now().
struct SpanClock {
  double (*now)() = &seconds_now;
};

}  // namespace tranche::detail
