#pragma once
/// Internal: shared by memory_profile.cpp (life, summary), memory_files.cpp (text files) and
/// memory_plots.cpp.

#include <string>
#include <vector>

#include "device/process_memory.h"
#include "report/plot.h"
#include "tranche/core/trace.h"
#include "tranche/report/memory_profile.h"

namespace tranche::memory_profile {

/// The process's memory at a moment, and the tracked part of it.
struct ProcessSample {
  detail::ProcessMemory process;
  std::int64_t tracked = 0;  ///< of the tiers in the process's memory
  std::int64_t step = 0;     ///< the latest step that had ended; 0: before the engine
};

/// The figures that a rank sends all others.
struct RankFigures {
  std::array<std::int64_t, tier_count>
      block_free{};  ///< bytes of the arena's block without a slot at the peak (in `other`)
  MemoryFigures measured, predicted;
  ProcessSample before, highest;
  std::int64_t own_bytes = 0;  ///< of the profile itself
  MemoryInfo device;
  std::int64_t device_tracked = 0;  ///< at the time of `device`
};

struct Summary {
  std::vector<RankFigures> ranks;
  bool predicted = false;
  bool device_in_process = false;  ///< device memory is process memory (cpu)
  std::string peak_moment;         ///< of rank 0's device tier
  std::string directory;
};

// --- memory_profile.cpp
/// The verdict, then the table of rank 0. `explained`: with the parts of the figures, for the file.
std::string summary_text(const Summary& summary, bool explained);
std::string summary_json(const Summary& summary);

// --- memory_files.cpp
/// "backward h.3 of step 2", "evaluate h.0 after step 6".
std::string moment_of(const MemoryRecord& record, const MemoryRecord::Peak& peak);
struct RankNumber {
  int rank = 0, ranks = 1;
};
std::string timeline_csv(const MemoryRecord& record);
std::string timeline_json(const MemoryRecord& record, RankNumber rank);
std::string phases_csv(const MemoryRecord& record);
std::string peak_json(const MemoryRecord& record, RankNumber rank);
std::string peak_text(const MemoryRecord& record, RankNumber rank);
/// Adds counters of all tiers and categories, and spans of phases, units and steps.
void add_to_trace(const MemoryRecord& record, TraceRecorder& trace);

// --- memory_plots.cpp
/// A step that is recorded completely.
struct StepWindow {
  std::int64_t step = 0;
  double begin = 0, end = 0;
};
std::vector<StepWindow> whole_steps(const MemoryRecord& record);
struct NamedPlot {
  std::string name, svg;
};
/// Plots of every tier in use: the last complete step, the step of the peak if that held more, and the run.
std::vector<NamedPlot> rank_plots(const MemoryRecord& record, RankNumber rank);
/// Bars by category for all ranks, and predicted against measured, for every tier in use.
std::vector<NamedPlot> job_plots(const Summary& summary);

}  // namespace tranche::memory_profile
