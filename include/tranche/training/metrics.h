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
/// of an element of `steps` in docs/reference/report.md. JSON has no infinities and NaN, so they are null.
std::string step_line(const StepResult& result);
/// {"step", "validation_loss", "tokens"}, and "set" if the held-out set has a name, in the same way.
std::string validation_line(std::int64_t step, const EvaluationResult& result, const std::string& set = {});

/// A step's points for a ScalarLog, under DeepSpeed's names: Train/Samples/train_loss, lr, gradient_norm,
/// tokens_per_second (of positions, learned or not) if the step's time is known, learned_tokens_per_second if
/// that differs, and loss_scale if `scales_loss` (fp16).
std::vector<Scalar> step_scalars(const StepResult& result, bool scales_loss = false);
/// A held-out set's point: Validation/SET/loss, or DeepSpeed's Validation/Samples/loss for a set without a
/// name.
Scalar validation_scalar(const EvaluationResult& result, const std::string& set = {});

/// A file of such lines, each written as soon as it is added. One process uses it, usually rank 0: the file
/// is locked (flock) as long as the object lives.
class MetricsFile {
 public:
  /// Throws ConfigurationError unless such a file can be written. If `goes_on` is false (the run resumes
  /// nothing) it also throws for an existing file that is not empty, because it belongs to another run.
  /// Errors call it `called`.
  static void require(const std::string& path, bool goes_on, std::string_view called = "metrics file");

  /// Continues after the lines of steps up to `step`: removes lines of later steps, which ran after the
  /// checkpoint from which the run continues, and a line that a kill cut short. Throws ConfigurationError,
  /// also if another process writes the file.
  MetricsFile(std::string path, std::int64_t step, std::string called = "metrics file");
  /// Adds a line with a "step". Returns a message the first time that it cannot be written, because training
  /// continues without. Empty otherwise.
  std::string add(const std::string& line);
  /// A message for people about the lines of later steps that were removed; empty: there were none.
  const std::string& note() const noexcept { return note_; }

 private:
  std::string path_, called_, note_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace tranche::training
