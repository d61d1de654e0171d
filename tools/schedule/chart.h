#pragma once
#include <string>

#include "pipeline/schedule/pipeline_schedule.h"
#include "pipeline/schedule/simulate.h"

namespace tranche::tools {

/// Draws a schedule over time, with a line for each rank in lines of at most 120 columns: "F3" is a forward
/// pass of micro-batch 3, and "2F3" if ranks hold several chunks; "--" continues the previous action. Idle
/// cells are "s", start-up, ".", bubble, and "c", cool-down. A cell is the largest time that divides those of
/// all actions. If it is too short, starts and ends are rounded, and the text says so. With more than
/// `most_chart_cells` cells on a rank there is only a line saying so.
std::string chart_text(const pipeline::PipelineSchedule& schedule, const pipeline::Simulation& run);
inline constexpr int most_chart_cells = 2000;

}  // namespace tranche::tools
