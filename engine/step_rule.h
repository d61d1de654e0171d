#pragma once
/// The parts of a step that a program can decide instead of the configuration: the learning rate, and whether
/// a gradient hook skips the step. Private to engine/.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/breakdown.h"
#include "engine/step_record.h"
#include "tranche/config/config.h"
#include "tranche/engine/training_rule.h"

namespace tranche::detail {

class StepRule {
 public:
  /// `own`: the program's schedule; null: the configuration's. The other arguments must outlive it.
  StepRule(const Runtime& runtime, const Config& config, std::unique_ptr<Schedule> own, Breakdown& breakdown);

  /// Sets a rate instead of the schedule's; nullopt restores the schedule's. Throws InvalidArgument.
  void set_rate(std::optional<double> rate);
  void set_hook(GradientHook hook) { hook_ = std::move(hook); }
  /// Schedule::describe() of the program's own schedule, or else a text that it is the configuration's.
  std::string schedule() const;

  /// The number, rate and momentum of an update.
  OptimizerStep update(std::int64_t number) const;
  /// Sets this rank's rate, momentum and hook in its record.
  void declare(const OptimizerStep& update, StepRecord& mine) const;
  /// Throws unless all ranks have equal rates and momenta that check_rates() takes, and agree about a hook.
  void check(const std::vector<StepRecord>& records, std::int64_t step) const;
  /// Ends the engine unless the momentum is finite, and the rate of each parameter group an fp32 number that
  /// is not negative; all ranks have the same.
  void check_rates(const OptimizerStep& update, std::int64_t step) const;
  /// Collective. The reason why the program's hook wants the step skipped, equal on all ranks; empty: it does
  /// not. `gradient_scale` is the factor from the main gradient to the gradient that the update uses.
  std::string ask_hook(const StepResult& found, double gradient_scale);
  /// `gradient_scale` of ask_hook() while the hook runs; empty otherwise.
  const std::optional<double>& hook_scale() const { return hook_scale_; }

  /// The rule's state as JSON text for a checkpoint.
  std::string saved() const;
  void take_saved(const std::string& text, std::vector<std::string>& notes);

 private:
  const Runtime& runtime_;
  const Config& config_;
  std::optional<std::string> own_;  ///< Schedule::describe() of the program's own schedule
  std::unique_ptr<Schedule> schedule_;
  Breakdown& breakdown_;
  std::optional<double> rate_;
  GradientHook hook_;
  std::optional<double> hook_scale_;
};

}  // namespace tranche::detail
