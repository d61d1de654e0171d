#pragma once
#include <string>

#include "pipeline/schedule/pipeline_schedule.h"
#include "pipeline/schedule/simulate.h"

namespace tranche::tools {

/// A schedule over time, a line for each rank in lines of at most 120 columns: "F3" is a forward pass of
/// micro-batch 3, and "2F3" where ranks hold several chunks; "--" goes on with the action in front of it.
/// Idle cells are "s", start-up,
/// ".", bubble, and "c", cool-down. A cell is the longest time that divides those of all actions. Where that
/// is too short, starts and ends are rounded, and the text says so. Empty, with a line that says so, for more
/// than `most_chart_cells` cells on a rank.
std::string chart_text(const pipeline::PipelineSchedule& schedule, const pipeline::Simulation& run);
inline constexpr int most_chart_cells = 2000;

}  // namespace tranche::tools
