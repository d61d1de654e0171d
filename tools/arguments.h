#pragma once
/// The command line.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/checkpoint/checkpoint_arguments.h"
#include "tools/config_arguments.h"
#include "tools/scale/scale_arguments.h"
#include "tools/schedule/schedule_arguments.h"
#include "tools/tokenize.h"
#include "tranche/models/model_registry.h"

namespace tranche::tools {

enum class Command : std::uint8_t {
  none,
  train,
  evaluate,
  generate,
  plan,
  calibrate,
  scale,
  checkpoint,
  config,
  schedule,
  info,
  tokenize
};

/// A rank and a step (1 is the first), for intentional failures.
struct Fault {
  int rank = -1;
  std::int64_t step = 0;
};

/// A flag as it was given, for people: "--steps" and "100", or "not given".
struct Flag {
  std::string name, value;
};

/// The command line. A flag that is not set does not change the configuration file, or the default.
struct Options {
  Command command = Command::none;
  /// Help or version text: if not empty, print it and end with status 0.
  std::string text;
  /// Names and values that ranks compare at the start: the command and each of its flags, set or not, in the
  /// order of its help. The value of a path is "given", because nodes may have different paths (the contents
  /// are compared when they are read). Flags that may differ between ranks are left out.
  std::vector<Flag> flags;

  /// A line for each flag that was given several times; its last value is used.
  std::vector<std::string> notes;

  models::ModelRegistry models;  ///< in which --model is looked up
  std::string config;            ///< path of DeepSpeed's JSON; empty: defaults
  /// The path of `config` and its text, once it was read: a pipe can be read once. Copies share it.
  std::shared_ptr<std::pair<std::string, std::string>> config_text =
      std::make_shared<std::pair<std::string, std::string>>();
  std::string model = "gpt-mini";         ///< preset or config.json
  std::vector<std::string> data_sources;  ///< the values of --data: PATTERN or PATTERN:WEIGHT
  std::string data;                       ///< the same in one line
  std::string data_format = "auto";
  /// PATTERN, or NAME=PATTERN for each set; empty: the tail of `data`.
  std::vector<std::string> validation_data;
  double validation_fraction = 0.05;

  std::optional<std::int64_t> stage, steps, micro_batch, accumulate, sequence, seed, threads;
  std::optional<double> learning_rate;
  std::optional<std::string> dtype, device_memory, mesh;
  std::optional<std::string> offload_optimizer, offload_parameters;  ///< none, cpu or nvme
  std::optional<std::string> nvme_path, host_memory, host_state, nvme_space;
  std::optional<double> offload_ratio;
  bool offload_activations = false;
  std::string device = "cpu";
  std::vector<std::string> set;  ///< "key.path=value"
  /// How many values of --set stand in front of a flag (of its last value); flags in front of all are left
  /// out.
  std::map<std::string, std::size_t, std::less<>> sets_before;
  std::vector<std::string> of_checkpoint;  ///< overrides that the checkpoint of --resume asks for
  bool strict = false;                     ///< unknown keys are errors in any place
  bool verbose = false;                    ///< print a line for each key without effect
  bool documents = false;                  ///< for a plan: batches contain document starts

  std::int64_t eval_every = 0;  ///< steps; 0: only at the end
  /// The number of held-out windows in units of the step's batch; 0: all of them. Not given:
  /// default_validation_tokens.
  std::optional<std::int64_t> eval_batches;
  std::int64_t digest_every = 0;
  double max_seconds = 0;
  std::int64_t min_steps = 1;
  std::optional<std::int64_t> stopped_status;  ///< if a signal stopped the run; default stopped_by_signal
  std::int64_t log_every = 0;
  std::int64_t sample_bytes = 0;
  bool ngrams = false;

  std::string checkpoint_dir;
  std::int64_t save_every = 0;  ///< steps; 0: only at the end
  std::int64_t keep_last = 0;   ///< with keep_every, as in SaveOptions
  std::int64_t keep_every = 0;
  bool keep_best = false;  ///< according to the held-out set `best_by`; empty: the first
  std::string best_by;
  std::string resume;               ///< "latest", "best", or a path
  bool resume_strict = false;       ///< a damaged checkpoint is an error instead of being skipped
  std::string resume_weights_only;  ///< a path
  bool convert_state = false;       ///< accept state that was saved in another format
  bool partial = false;             ///< load the tensors of that path that fit the model
  std::vector<std::string> rename;  ///< "OLD=NEW"
  /// True if --resume chooses among the run's own checkpoints, which are complete.
  bool resumes_own() const { return resume == "latest" || resume == "best"; }
  std::string from;  ///< evaluate: a path
  std::string base;  ///< the base of a checkpoint of adapters, if it was moved

  std::string report, trace;
  std::string metrics;         ///< a file with one line per step
  std::string memory_profile;  ///< directory
  double peak_seconds = 0.3;   ///< for the matmul measurement; --debug-peak-seconds, for many short runs
  /// --debug-fail, --debug-hang, --debug-out-of-memory: not shown in the help. The last allocates, on one
  /// rank, the memory that --device-memory leaves, before the engine is made (step 0) or in the middle of
  /// step 1 or 2: later steps allocate nothing.
  Fault fail, hang, out_of_memory;

  bool json = false;              ///< info, plan, scale
  std::string system_root = "/";  ///< replaces "/" in tests; no flag

  // plan
  std::int64_t ranks = 1, ranks_per_node = 0;
  std::optional<std::int64_t> rank;
  std::optional<std::string> fit;      ///< the largest device memory of a rank
  std::string write;                   ///< path for the chosen configuration
  std::optional<std::string> network;  ///< of a rank with --fit, of a node with --machine: RATE,LATENCY
  std::string flops = "100T", host_link = "50GB", nvme_bandwidth = "5GB";
  std::string machine;      ///< file or name of a machine description; empty: no step time
  std::string host_update;  ///< empty: core_update_rate for each of --threads

  // calibrate
  std::string calibration;      ///< path of the description
  std::string machine_name;     ///< empty: the system's host name
  std::string calibration_dir;  ///< on the disk to measure; empty: none
  double calibration_seconds = 30;

  CheckpointOptions checkpoint;     ///< for the command of this name
  GenerateOptions generate;         ///< for the command of this name
  ScaleOptions scale;               ///< for the command of this name
  ScheduleOptions schedule;         ///< for the command of this name
  TokenizeFlags tokenize;           ///< for the command of this name
  ConfigCheckOptions config_check;  ///< for `tranche config check`
};

/// Parses arguments (without the program's name). Throws ConfigurationError for unknown flags and commands
/// (with the closest match), invalid values, and features of later versions. `models` are those that --model
/// and checkpoints may name.
Options parse_arguments(const std::vector<std::string>& arguments,
                        const models::ModelRegistry& models = models::ModelRegistry::with_builtin());

}  // namespace tranche::tools
