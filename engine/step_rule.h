#pragma once
/// The decisions about a step that a program can take from the configuration: the learning rate, and whether
/// a gradient hook lets the step happen. Private to engine/.

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
  /// `own`: the program's schedule; null: the configuration's. The others outlive it.
  StepRule(const Runtime& runtime, const Config& config, std::unique_ptr<Schedule> own, Breakdown& breakdown);

  /// In place of the schedule's; nullopt: the schedule's again. Throws InvalidArgument.
  void set_rate(std::optional<double> rate);
  void set_hook(GradientHook hook) { hook_ = std::move(hook); }
  /// Schedule::describe() of the program's own; else that it is the configuration's.
  std::string schedule() const;

  /// Number, rate and momentum of an update.
  OptimizerStep update(std::int64_t number) const;
  /// Says to the other ranks what update() gives and whether there is a hook.
  void declare(const OptimizerStep& update, StepRecord& mine) const;
  /// Throws unless all ranks would update alike, and with numbers.
  void check(const std::vector<StepRecord>& records, std::int64_t step) const;
  /// Ends the engine on all ranks, which have the same, where a number of the update is not finite.
  void check_finite(const OptimizerStep& update, std::int64_t step) const;
  /// Collective. Why the program's hook wants the step skipped, as all ranks say; empty: it does not.
  /// `gradient_scale`: from the main gradient to what the update takes.
  std::string ask_hook(const StepResult& found, double gradient_scale);
  /// `gradient_scale` of ask_hook() while the hook runs; empty otherwise.
  const std::optional<double>& hook_scale() const { return hook_scale_; }

  /// JSON text for a checkpoint, and back.
  std::string saved() const;
  void take_saved(const std::string& text, std::vector<std::string>& notes);

 private:
  const Runtime& runtime_;
  const Config& config_;
  std::optional<std::string> own_;  ///< Schedule::describe() of one that the program brought
  std::unique_ptr<Schedule> schedule_;
  Breakdown& breakdown_;
  std::optional<double> rate_;
  GradientHook hook_;
  std::optional<double> hook_scale_;
};

}  // namespace tranche::detail
