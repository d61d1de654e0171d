#pragma once
/// Records a step's passes, times and traffic. Private to engine/.

#include <array>
#include <cstdint>

#include "engine/exposed_time.h"
#include "engine/host_copies.h"
#include "engine/parameter_gatherer.h"
#include "engine/step_traffic.h"
#include "tranche/device/step_arena.h"
#include "tranche/engine/step_result.h"

namespace tranche::detail {

/// It uses no other part of the engine. The first pass of a program records the order of units; the second
/// runs with prefetch, after which its memory is packed; later ones reuse that, or have larger sizes packed
/// again.
class StepRecorder {
 public:
  /// Both must outlive it. `plan_memory` false: passes are never packed.
  StepRecorder(StepArena& arena, Stream& compute, bool plan_memory);

  /// The passes then include the copies of activations in host memory; null: activations stay on the device.
  void set_host_copies(HostCopies* copies) { host_copies_ = copies; }

  // --- Passes ---
  /// `shape`: the first micro-batch's (StepArena::begin).
  void begin_pass(Program program, const Shape& shape = {});
  void next_micro_batch(const Shape& shape);
  /// Throws LogicError, with nothing changed, while memory of the pass is held.
  void end_pass();
  /// Abandons the pass. Buffers that are still held stay valid; the program's next pass records anew.
  void abandon_pass(Program program);
  bool pass_open() const { return arena_.active(); }
  /// True if plans were made since the last call, so that memory outside the packed block can be freed.
  bool take_repacked();
  /// The next pass of each program allocates its memory anew and is packed. Throws LogicError while memory is
  /// held.
  void forget_passes();
  std::int64_t passes(Program program) const { return passes_[static_cast<std::size_t>(program)]; }

  // --- Times and traffic ---
  ExposedTime& exposed() { return exposed_; }
  PassTimes& pass_times() { return pass_times_; }
  const StepTraffic& traffic() const { return traffic_; }
  /// Called when the first micro-batch of a step begins.
  void begin_step(std::span<Communicator* const> groups);
  /// Called when the step is complete: sets its times in `result`, and counts the training pass. The device
  /// must have passed the step's end.
  void end_step(std::span<Communicator* const> groups, StepResult& result);
  /// `update_began`: when the gradients were available, in seconds_now().
  void stamp(StepResult& result, double update_began);
  /// Forgets the times of a pass without backward.
  void clear_times();

 private:
  StepArena& arena_;
  bool plan_memory_;
  HostCopies* host_copies_ = nullptr;
  std::array<std::int64_t, program_count> passes_{};
  std::int64_t packings_ = 0;  ///< the arena's count at the last take_repacked()
  ExposedTime exposed_;
  PassTimes pass_times_;  ///< with wall_clock_breakdown
  StepTraffic traffic_;
  double step_started_, step_ended_;
  double between_steps_ = 0;  ///< from the end of the step before to the beginning of this one
};

}  // namespace tranche::detail
