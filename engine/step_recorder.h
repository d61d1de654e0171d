#pragma once
/// A step's passes, times and traffic as they are recorded. Private to engine/.

#include <array>
#include <cstdint>

#include "engine/exposed_time.h"
#include "engine/host_copies.h"
#include "engine/parameter_gatherer.h"
#include "engine/step_traffic.h"
#include "tranche/device/step_arena.h"
#include "tranche/engine/step_result.h"

namespace tranche::detail {

/// Knows no other part of the engine. The first pass of a program records the order of units, the second runs
/// with prefetch and has its memory packed, later ones replay that, or have what is larger packed again.
class StepRecorder {
 public:
  /// Both outlive it. `plan_memory` false: passes are never packed.
  StepRecorder(StepArena& arena, Stream& compute, bool plan_memory);

  /// Activations that leave the device repeat with the passes; null: they stay.
  void set_host_copies(HostCopies* copies) { host_copies_ = copies; }

  // --- Passes ---
  /// `shape`: of the first micro-batch (StepArena::begin).
  void begin_pass(Program program, const Shape& shape = {});
  void next_micro_batch(const Shape& shape);
  /// LogicError, nothing having changed, while memory of the pass is held.
  void end_pass();
  /// Gives the pass up. Buffers that are still held stay valid; the program's next pass records anew.
  void abandon_pass(Program program);
  bool pass_open() const { return arena_.active(); }
  /// True where plans were made since the last call: what the passes took beside the block can go back.
  bool take_repacked();
  /// The next pass of each program takes its memory anew and is packed. LogicError while memory is held.
  void forget_passes();
  std::int64_t passes(Program program) const { return passes_[static_cast<std::size_t>(program)]; }

  // --- Times and traffic ---
  ExposedTime& exposed() { return exposed_; }
  PassTimes& pass_times() { return pass_times_; }
  const StepTraffic& traffic() const { return traffic_; }
  /// The first micro-batch of a step begins.
  void begin_step(std::span<Communicator* const> groups);
  /// The step is complete: its times, and the passes of the training program. The device has passed the
  /// step's end.
  void end_step(std::span<Communicator* const> groups, StepResult& result);
  /// `update_began`: when gradients were there, in seconds_now().
  void stamp(StepResult& result, double update_began);
  /// Forgets times of a forward pass alone.
  void clear_times();

 private:
  StepArena& arena_;
  bool plan_memory_;
  HostCopies* host_copies_ = nullptr;
  std::array<std::int64_t, program_count> passes_{};
  std::int64_t packings_ = 0;  ///< of the arena at the last take_repacked()
  ExposedTime exposed_;
  PassTimes pass_times_;  ///< with wall_clock_breakdown
  StepTraffic traffic_;
  double step_started_, step_ended_;
  double between_steps_ = 0;  ///< from the end of the step before to the beginning of this one
};

}  // namespace tranche::detail
