#pragma once
/// --memory-profile: the profile of a run beside the prediction from the same run on the meta device.

#include <memory>
#include <string>

#include "tranche/report/memory_profile.h"

namespace tranche::tools {

struct Run;

/// The number of spans that a profile's trace keeps from the first steps, and again from the latest.
inline constexpr std::int64_t profile_trace_events = std::int64_t{1} << 16;

/// Collective, at the end of a run whose profile has ended. Each rank predicts its own memory; writes the
/// files, and returns the table for people on rank 0.
std::string write_profile(const Run& run);

}  // namespace tranche::tools
