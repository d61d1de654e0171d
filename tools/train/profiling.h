#pragma once
/// --memory-profile: the profile of a run beside what the same run on the meta device would hold.

#include <memory>
#include <string>

#include "tranche/report/memory_profile.h"

namespace tranche::tools {

struct Run;

/// Spans that a profile's trace keeps: of the first steps, and as many of the latest.
inline constexpr std::int64_t profile_trace_events = std::int64_t{1} << 16;

/// Collective, at the end of a run whose profile has ended. Predicts, on each rank its own memory, writes the
/// files, and returns the table for people on rank 0.
std::string write_profile(const Run& run);

}  // namespace tranche::tools
