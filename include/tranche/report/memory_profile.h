#pragma once
/// The memory profile of a run: the memory that a program held over time and at its peak, as tables,
/// timelines, a trace and plots. docs/guides/memory.md explains how to read it.

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "tranche/device/ledger.h"
#include "tranche/device/memory_timeline.h"
#include "tranche/engine/runtime.h"

namespace tranche {

/// Peaks by tier and category: measured, or predicted by a plan of the same run.
struct MemoryFigures {
  std::array<std::int64_t, tier_count> peak{};
  std::array<CategoryBytes, tier_count> at_peak;  ///< adds up to `peak`
  std::array<CategoryBytes, tier_count> highest;  ///< each category's own
  static MemoryFigures of(const Ledger& ledger);
  /// The figures of each tier, in the form of planner::PlanResult::tiers.
  static MemoryFigures of(const std::array<TierAccount, tier_count>& tiers);
};

/// Construct it after the Runtime and before the Engine, so that it records all allocations of the Engine;
/// destroy it before the Runtime. It takes no tracked memory, waits for nothing and changes no bits. A
/// Runtime with RuntimeOptions::trace adds spans of compute and communication beside the counters.
///
///     Runtime runtime(options, ...);
///     MemoryProfile profile(runtime);
///     Engine engine(runtime, ...);
///     for (...) { ... profile.end_step(engine.step().step); }
///     MemoryFigures predicted = MemoryFigures::of(planner::plan_run(request).tiers);
///     std::string table = profile.write("profile", &predicted);
class MemoryProfile {
 public:
  explicit MemoryProfile(Runtime& runtime, const MemoryTimelineOptions& options = {});
  ~MemoryProfile();
  MemoryProfile(const MemoryProfile&) = delete;
  MemoryProfile& operator=(const MemoryProfile&) = delete;

  /// Marks the end of a step and samples the process's memory. Not collective.
  void end_step(std::int64_t step);
  /// Ends the measurement that write() writes; otherwise write() does so itself. Steps that end later are not
  /// included. Not collective.
  void end();
  const MemoryTimeline& timeline() const;

  /// Collective over runtime.all(). Creates `directory` and writes into it: for every rank `rank<r>/` with
  /// the timeline (CSV, JSON), peaks by phase, the allocations alive at the peak, a trace for Perfetto and
  /// plots of a step and of the run; from rank 0 summary.txt, summary.json, and plots of all ranks and of
  /// predicted against measured. Returns the summary, on rank 0 (elsewhere empty). Throws IoError on all
  /// ranks when a file cannot be written, naming it.
  std::string write(const std::string& directory, const MemoryFigures* predicted = nullptr);
  /// Throws ConfigurationError unless write() could put this rank's files there, so that this is reported
  /// before the training, not after. Creates the directories.
  static void require_directory(const std::string& directory, int rank);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche
