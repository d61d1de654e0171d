#pragma once
/// The figures of steps and evaluations, as lines of JSON in a file and as points of curves.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/engine/step_result.h"
#include "tranche/report/scalar_log.h"

namespace tranche::training {

/// A step as one line of JSON: "step", "loss", "grad_norm", "lr", "tokens", "seconds" and the other figures
/// of an element of `steps` in docs/reference/report.md. JSON has no infinities and no NaN: null stands for
/// them.
std::string step_line(const StepResult& result);
/// {"step", "validation_loss", "tokens"}, and "set" where the held-out set has a name, likewise.
std::string validation_line(std::int64_t step, const EvaluationResult& result, const std::string& set = {});

/// A step's points for a ScalarLog, under DeepSpeed's names: Train/Samples/train_loss, lr, gradient_norm,
/// tokens_per_second (of positions, learned or not) where the step's time is known, also
/// learned_tokens_per_second where that is another figure, and loss_scale if `scales_loss` (fp16).
std::vector<Scalar> step_scalars(const StepResult& result, bool scales_loss = false);
/// A held-out set's point: Validation/SET/loss, DeepSpeed's Validation/Samples/loss of a set without a
/// name.
Scalar validation_scalar(const EvaluationResult& result, const std::string& set = {});

/// A file of such lines, each in the file as soon as it is added. Of one process, rank 0 as a rule.
class MetricsFile {
 public:
  /// Throws ConfigurationError unless such a file can be written; where `goes_on` is false (the run resumes
  /// nothing) also when it is there and not empty, as it is of another run. Errors call it `called`.
  static void require(const std::string& path, bool goes_on, std::string_view called = "metrics file");

  /// Goes on behind the lines of steps up to `step`: those of later steps, which were done after the
  /// checkpoint that the run goes on from, are taken out, and a line that a kill cut short. Throws
  /// ConfigurationError.
  MetricsFile(std::string path, std::int64_t step, std::string called = "metrics file");
  /// Adds a line, which has a "step". Returns what to say when it cannot be written: once, since training
  /// goes on without. Empty otherwise.
  std::string add(const std::string& line);

 private:
  std::string path_, called_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace tranche::training
