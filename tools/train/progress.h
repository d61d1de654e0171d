#pragma once
/// The progress line.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/engine/step_result.h"

namespace tranche::tools {

struct ProgressOptions {
  std::int64_t begin = 0;          ///< steps done earlier, in a resumed run
  std::int64_t steps = 0;          ///< the last step
  double maximum_seconds = 0;      ///< of training; 0: no limit
  std::int64_t minimum_steps = 0;  ///< steps taken even beyond maximum_seconds
  std::int64_t log_every = 0;      ///< steps between lines in a file; 0: about 50 lines in all
  double flops_per_token = 0;      ///< per position, learned or not
  double peak_flops = 0;           ///< of all ranks together; 0: not measured, the share is left out
  bool terminal = false;           ///< redraw one line instead of writing lines at intervals
};

/// Tokens per second over all ranks. Fewer are learned than computed if some are not targets, such as those
/// of prompts. Work, and so the share of a peak, counts positions.
struct TokenRate {
  double positions = 0, learned = 0;
  TokenRate operator*(double factor) const { return {positions * factor, learned * factor}; }
  TokenRate operator+(const TokenRate& other) const {
    return {positions + other.positions, learned + other.learned};
  }
};
/// "   2000 tokens/s", followed by " (310 learned)" if that figure differs.
std::string format_rate(const TokenRate& rate, int width = 0);

/// Shows steps on rank 0. It writes through a function, so that tests can read the output.
class Progress {
 public:
  using Writer = std::function<void(std::string_view)>;
  Progress(const ProgressOptions& options, Writer write);
  /// Shows a step that ended `elapsed` seconds after training began.
  void step(const StepResult& result, double elapsed);
  /// Shows a validation that has run for `seconds`, with `done` of its windows. In a terminal the line is
  /// redrawn; in a file one is written every ten seconds.
  void validating(std::int64_t done, std::int64_t windows, double seconds);
  /// Writes a permanent line (validation, notes); in a terminal the progress line continues below it.
  void say(std::string_view line);
  /// Ends a redrawn line.
  void finish();
  /// Tokens per second over all steps except the first two, which plan memory; over all steps if there are no
  /// more.
  TokenRate mean_rate() const;
  /// The share of the peak at that speed.
  double mean_peak_share() const;
  /// True when this step has a line if lines are written at intervals.
  bool due(std::int64_t step) const;

 private:
  std::string line(const StepResult& result, double remaining, const std::string& remark) const;
  double peak_share(const TokenRate& rate) const;
  /// "norm is 11x its recent median", for an unusual step; otherwise empty. Remembers the norm.
  std::string unusual(const StepResult& result);
  void redraw(const std::string& text);
  ProgressOptions options_;
  Writer write_;
  std::size_t drawn_ = 0;  ///< length of the redrawn line
  std::int64_t counted_steps_ = 0;
  TokenRate counted_, first_;  ///< sums without the first two steps, and of those two
  double counted_seconds_ = 0, first_seconds_ = 0;
  TokenRate recent_;            ///< smoothed
  std::vector<double> norms_;   ///< the last steps' norms, a ring buffer
  std::size_t next_norm_ = 0;   ///< position of the next one
  double written_seconds_ = 0;  ///< of the validation, at the last line in a file
};

/// The parts of a step in milliseconds, for wall_clock_breakdown:
///     step 7 in ms: forward 12.1, backward 24, update 3.06; waited for parameters 1.2, gradients 0.41,
///     offload 0; 41.2 in all, 5.03 before it
/// Waiting for parameters is part of forward and backward; waiting for gradients is part of neither.
std::string format_step_times(const StepResult& result);

/// "45 s", "3 min 20 s", "2 h 05 min".
std::string format_duration(double seconds);
/// "3 ms", "1.24 s".
std::string format_pause(double seconds);

}  // namespace tranche::tools
