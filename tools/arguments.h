#pragma once
/// The command line.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tranche::tools {

enum class Command : std::uint8_t { none, train, evaluate, info };

/// A rank and a step (1 is the first), for failures on purpose.
struct Fault {
  int rank = -1;
  std::int64_t step = 0;
};

/// What was asked for. What is not set leaves the configuration file, or the default, as it is.
struct Options {
  Command command = Command::none;
  /// Help or version text: print it and end with status 0.
  std::string text;

  std::string config;              ///< path of DeepSpeed's JSON; empty: defaults
  std::string model = "gpt-mini";  ///< preset or config.json
  std::string data;
  std::string data_format = "auto";
  std::string validation_data;  ///< a second file; empty: the tail of `data`
  double validation_fraction = 0.05;

  std::optional<std::int64_t> stage, steps, micro_batch, accumulate, sequence, seed, threads;
  std::optional<double> learning_rate;
  std::optional<std::string> dtype, device_memory;
  std::string device = "cpu";
  std::vector<std::string> set;  ///< "key.path=value"

  std::int64_t eval_every = 0;    ///< steps; 0: only at the end
  std::int64_t eval_batches = 0;  ///< times the step's batch, of held-out windows; 0: all of them
  std::int64_t digest_every = 0;
  double max_seconds = 0;
  std::int64_t min_steps = 1;
  std::int64_t log_every = 0;
  std::int64_t sample_bytes = 0;
  bool ngrams = false;
  std::string report, trace;
  Fault fail, hang;  ///< --debug-fail, --debug-hang: not shown in the help

  bool json = false;  ///< info
};

/// Reads arguments (without the program's name). Throws ConfigurationError: unknown flags and commands with
/// the nearest known one, values that are none, what belongs to later versions.
Options parse_arguments(const std::vector<std::string>& arguments);

}  // namespace tranche::tools
