#include "tools/arguments.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>

#include "core/closest_match.h"
#include "tools/flag_values.h"
#include "tools/help_formatter.h"
#include "tools/shell/shell_arguments.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"
#include "tranche/version.h"

namespace tranche::tools {

namespace {

constexpr const char* commands_text =
    "train, evaluate, generate, plan, config, calibrate, scale, schedule, checkpoint, tokenize, completion "
    "and info";

Fault parse_fault(const std::string& text, const char* flag, long long first_step = 1) {
  int rank = 0, used = 0;
  long long step = 0;
  if (std::sscanf(text.c_str(), "%d:%lld%n", &rank, &step, &used) != 2 ||
      static_cast<std::size_t>(used) != text.size() || rank < 0 || step < first_step) {
    throw ConfigurationError(fmt::format("{} '{}' is not RANK:STEP", flag, text));
  }
  return {rank, step};
}

struct Raw {
  std::string debug_fail, debug_hang, debug_out_of_memory;
};

/// Adds a flag with the type of its value as the help shows it: FILE, DIR, SIZE, or the allowed values.
template <typename Value>
CLI::Option* add(CLI::App& app, const char* flag, Value& value, const char* type, const char* text) {
  return app.add_option(flag, value, text)->type_name(type);
}
/// Adds a flag for a number, whose type CLI11 knows.
template <typename Value>
CLI::Option* add_number(CLI::App& app, const char* flag, Value& value, const char* text) {
  return app.add_option(flag, value, text);
}

/// Sets the help's heading for the flags that are added afterwards.
void heading(CLI::App& app, const char* group) {
  app.option_defaults()->group(group);
}

/// Adds the flags of model and configuration, which `train`, `evaluate` and `plan` share.
void add_model_flags(CLI::App& app, Options& options) {
  heading(app, "Model");
  add(app, "--model", options.model, "PRESET|FILE", "preset or Hugging Face config.json")
      ->capture_default_str();
  add_number(app, "--sequence", options.sequence,
             "tokens of a sequence (default: all the model has positions for, at most 1024)");
  add(app, "--dtype", options.dtype, "fp32|bf16|fp16",
      "compute dtype (default: --config's, without one bf16)");
  add_number(app, "--seed", options.seed, "of initial weights, order of samples, dropout (default: 1234)");
  heading(app, "Configuration");
  add(app, "--config", options.config, "FILE", "configuration in DeepSpeed's JSON; flags override it");
  add(app, "--set", options.set, "KEY=VALUE", "key.path=value of the configuration; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  app.add_flag("--strict", options.strict, "refuse every key of the configuration that is not known");
  app.add_flag("--verbose", options.verbose, "a line for each key of the configuration without effect");
  heading(app, "Batch");
  add_number(app, "--micro-batch", options.micro_batch, "sequences of a micro-batch on a rank");
  add_number(app, "--accumulate", options.accumulate, "micro-batches of a step");
  heading(app, "ZeRO and offload");
  add(app, "--stage", options.stage, "0|1|2|3", "ZeRO stage");
  add(app, "--mesh", options.mesh, "AXES",
      "axes of the ranks, like 'replicate=2, shard=*': copies of the state, and the ranks that share one");
  add(app, "--offload-optimizer", options.offload_optimizer, "none|cpu|nvme",
      "where master weights and the optimizer's state live; none: on the device");
  add(app, "--offload-param", options.offload_parameters, "none|cpu|nvme",
      "where the shards of weights live in stage 3; none: on the device");
  add_number(app, "--offload-ratio", options.offload_ratio,
             "share of the optimizer's state that leaves the device, 0 to 1 (default: 1)");
  app.add_flag(
      "--offload-activations", options.offload_activations,
      "keep the inputs of blocks in host memory until backward; switches activation checkpointing on");
  add(app, "--nvme-path", options.nvme_path, "DIR", "folder for swap files, on the disk that nvme means");
  heading(app, "Device and memory");
  add(app, "--device", options.device, "cpu|cuda", "where a rank computes")->capture_default_str();
  add_number(app, "--threads", options.threads, "of a rank (default: the node's cores over its ranks)");
  add(app, "--device-memory", options.device_memory, "SIZE", "most memory of a rank, like 512MiB");
  add(app, "--host-memory", options.host_memory, "SIZE", "most host memory of a rank, like 64GiB");
  add(app, "--host-state", options.host_state, "SIZE|auto",
      "host memory of a rank for state that is asked for on nvme; 0: none (default: auto, what is free)");
  add(app, "--nvme-space", options.nvme_space, "SIZE", "most room of a rank's swap file, like 1TiB");
}

/// Adds the flags that `train` and the runs of `scale` share, beside model and configuration.
void add_data_flags(CLI::App& app, Options& options) {
  heading(app, "Data and validation");
  add(app, "--data", options.data_sources, "FILE[:WEIGHT]",
      "text file (bytes), or tokens of tranche tokenize, llm.c or nanoGPT, or a pattern like 'data/*.bin'; "
      "may be "
      "repeated, with weights like a.bin:0.7 for a mixture")
      ->take_all()
      ->allow_extra_args(false);
  add(app, "--data-format", options.data_format, "auto|text|llmc|nanogpt|uint32|safetensors",
      "of --data and --validation-data")
      ->capture_default_str();
  add(app, "--validation-data", options.validation_data, "[NAME=]FILE",
      "held-out file, or a pattern, instead of the tail of --data; may be repeated, with names like "
      "code=c.bin for several sets")
      ->take_all()
      ->allow_extra_args(false);
  add_number(app, "--validation-fraction", options.validation_fraction, "held-out tail of --data")
      ->capture_default_str();
  add_number(app, "--eval-batches", options.eval_batches,
             "held-out windows of a validation, in units of the step's batch; 0: all (default: windows of "
             "131072 tokens; all with --ngrams and in tranche evaluate)");
}

void add_run_flags(CLI::App& app, Options& options, Raw& raw) {
  add_model_flags(app, options);
  add_data_flags(app, options);
  app.add_flag("--ngrams", options.ngrams,
               "n-gram cross-entropies of the held-out text beside the validation loss");
  heading(app, "Output");
  add(app, "--report", options.report, "FILE", "JSON report (docs/reference/report.md)");
  app.add_option("--debug-fail", raw.debug_fail)->group("");
  app.add_option("--debug-hang", raw.debug_hang)->group("");
  app.add_option("--debug-peak-seconds", options.peak_seconds)->group("");
  app.add_option("--debug-out-of-memory", raw.debug_out_of_memory)->group("");
}

void add_plan_flags(CLI::App& app, Options& options) {
  app.get_option("--mesh")->type_name("AXES|search");
  app.get_option("--model")->description(
      "preset, config.json, or a list of units (docs/reference/plan-files.md)");
  app.get_option("--host-memory")
      ->description(
          "most host memory of a rank, like 64GiB (default: its share of what this machine has available; "
          "0: no limit)");
  heading(app, "Batch");
  app.add_flag("--documents", options.documents, "batches of a file that tells where documents begin");
  heading(app, "Ranks");
  add_number(app, "--ranks", options.ranks, "ranks of the run, 1 to 65536")->capture_default_str();
  add_number(app, "--ranks-per-node", options.ranks_per_node, "ranks of a node (default 0: all on one)");
  add_number(app, "--rank", options.rank,
             "the rank that is planned (default: 0; with a pipeline or the axis tensor one of each kind)");
  heading(app, "Search");
  add(app, "--fit", options.fit, "SIZE",
      "search the cheapest configuration that takes at most this device memory, like 80GiB; "
      "--stage, --micro-batch, --offload-optimizer and --offload-param are kept where given; nvme is "
      "tried with --nvme-path; with --mesh search, or --mesh 'search, tensor=2', the axes are searched too");
  add(app, "--write", options.write, "FILE", "with --fit: file for the configuration that was chosen");
  heading(app, "Speeds");
  add(app, "--machine", options.machine, "MACHINE|FILE",
      "step time on this machine, which --fit then compares: a file of tranche calibrate, or one that "
      "comes with the program, like dgx-h100 (docs/reference/plan-files.md)");
  add(app, "--network", options.network, "RATE",
      "with --machine: bytes that a node sends in a second, and a message's latency, like 50GB/s,5us "
      "(default: the machine's); with --fit alone: bytes that a rank sends in a second, like 12.5GB "
      "[12.5GB]");
  add(app, "--flops", options.flops, "RATE",
      "operations of a rank in a second, like 100T; as those below, without --machine, which has its own")
      ->capture_default_str();
  add(app, "--host-link", options.host_link, "SIZE",
      "bytes between device and host memory in a second, each way, of a rank")
      ->capture_default_str();
  add(app, "--nvme-bandwidth", options.nvme_bandwidth, "SIZE",
      "bytes that a rank reads and writes in a second")
      ->capture_default_str();
  add(app, "--host-update", options.host_update, "RATE",
      "parameters that a rank updates in host memory in a second (default: 0.85G for each of --threads)");
  heading(app, "Output");
  add(app, "--trace", options.trace, "FILE", "with --machine: timeline of the simulated step for Perfetto");
  app.add_flag("--json", options.json, "as JSON (docs/reference/plan-files.md)");
  app.footer(R"(Examples:
  tranche plan --model gpt2-xl --ranks 8 --stage 3
  tranche plan --model gpt2-xl --ranks 8 --set train_batch_size=512 --fit 16GiB --write f.json
  tranche plan --model gpt2-xl --offload-optimizer cpu --host-link 25GB --flops 300T
  tranche plan --model units.json --ranks 1024 --ranks-per-node 8 --stage 3 --json
  tranche plan --model gpt2-xl --device cuda --ranks 1024 --ranks-per-node 8 --stage 3 \
      --machine dgx-h100)");
}

void add_calibrate_flags(CLI::App& app, Options& options) {
  add(app, "--out", options.calibration, "FILE", "file for the description of the machine")->required();
  add(app, "--name", options.machine_name, "NAME", "of the machine (default: the node's name)");
  add(app, "--dir", options.calibration_dir, "DIR", "folder on the disk that is measured (default: none is)");
  add_number(app, "--threads", options.threads,
             "of a rank (default: the node's cores over the ranks at work)");
  add_number(app, "--seconds", options.calibration_seconds, "about how long to measure")
      ->capture_default_str();
  app.footer(R"(Examples:
  tranche calibrate --out machine.json
  mpirun -n 2 --bind-to none tranche calibrate --out machine.json --dir /scratch  # collectives, too
  tranche plan --model gpt2 --ranks 2 --stage 3 --machine machine.json)");
}

/// Adds the flags of `train` that runs of a study receive. Returns their names.
std::vector<std::string> add_study_flags(CLI::App& app, Options& options, Raw& raw) {
  add_model_flags(app, options);
  app.remove_option(app.get_option("--stage"));
  add_data_flags(app, options);
  heading(app, "Steps");
  add_number(app, "--lr", options.learning_rate, "learning rate (default: the configuration's, else 0.001)");
  app.add_option("--debug-fail", raw.debug_fail)->group("");
  app.add_option("--debug-peak-seconds", options.peak_seconds)->group("");
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_lnames().empty() && option->get_lnames().front() != "help")
      names.push_back("--" + option->get_lnames().front());
  }
  return names;
}

void add_train_flags(CLI::App& app, Options& options) {
  heading(app, "Steps");
  add_number(app, "--steps", options.steps, "step to reach (default: tranche.total_steps, else 100)");
  add_number(app, "--lr", options.learning_rate, "learning rate (default: the configuration's, else 0.001)");
  add_number(app, "--max-seconds", options.max_seconds,
             "end training after the first step beyond these (0: no limit)");
  add_number(app, "--min-steps", options.min_steps, "least steps, whatever --max-seconds says");
  heading(app, "Data and validation");
  add_number(app, "--eval-every", options.eval_every,
             "steps between validations (default 0: at the end only)");
  heading(app, "Checkpoints");
  add(app, "--checkpoint-dir", options.checkpoint_dir, "DIR",
      "folder of checkpoints, one that all ranks share; saves at the end, and on SIGUSR1, SIGUSR2, SIGTERM "
      "or SIGHUP, "
      "after which the run ends with status 9 (docs/guides/preemption.md)");
  add_number(app, "--stopped-status", options.stopped_status,
             "exit status of a run that such a signal stopped, 0 to 125 (default: 9)");
  add_number(app, "--save-every", options.save_every,
             "steps between checkpoints (default 0: at the end only)");
  add_number(app, "--keep-last", options.keep_last,
             "keep only the newest so many checkpoints (default 0: all)");
  add_number(app, "--keep-every", options.keep_every, "keep those whose step is a multiple of this, too");
  app.add_flag("--keep-best", options.keep_best,
               "save when a validation's loss is the lowest so far, and keep that checkpoint, too");
  add(app, "--best-by", options.best_by, "NAME",
      "held-out set of --keep-best and of --resume best (default: the first)");
  add(app, "--resume", options.resume, "latest|best|DIR",
      "latest: the newest complete checkpoint in --checkpoint-dir, or from the start while there is "
      "none (one that is damaged is passed over, and named); best: the one that --keep-best keeps, likewise; "
      "or the path of a checkpoint or a folder of them");
  app.add_flag(
      "--resume-strict", options.resume_strict,
      "with --resume latest: a damaged checkpoint ends the run, with status 4, instead of being passed "
      "over");
  add(app, "--resume-weights-only", options.resume_weights_only, "DIR",
      "start a new run from the weights of a checkpoint; with --resume latest, while there is none");
  add(app, "--base", options.base, "DIR",
      "where the base of a checkpoint of adapters is (default: where it was when they were trained)");
  app.add_flag("--convert-state", options.convert_state,
               "with --resume: take optimizer state or weights that were saved in another format than "
               "tranche.moments or tranche.master says, converted");
  app.add_flag(
      "--partial", options.partial,
      "take from --resume DIR or --resume-weights-only the tensors that the model has too; a line for each "
      "that is missing, and keeps its initial value, or passed over");
  app.add_option(
         "--rename", options.rename,
         "name of a tensor there and in the model, one * in both standing for the same text; may be given "
         "several times")
      ->type_name("OLD=NEW")
      ->take_all()
      ->allow_extra_args(false);
  heading(app, "Output");
  add_number(app, "--log-every", options.log_every,
             "steps between progress lines in a file (default: about 50 lines)");
  add(app, "--metrics", options.metrics, "FILE",
      "file of a JSON line for every step and validation, written as they come; goes on with "
      "--resume (docs/reference/report.md)");
  add_number(app, "--digest-every", options.digest_every,
             "steps between digests of all weights in the report");
  add(app, "--trace", options.trace, "FILE", "timeline of all ranks for Perfetto");
  add(app, "--memory-profile", options.memory_profile, "DIR",
      "directory for what every rank held over time and at its peak: tables, timelines, a trace and plots, "
      "beside what a plan of the run says (docs/guides/memory.md)");
  add_number(app, "--sample-bytes", options.sample_bytes,
             "print text of this many bytes from the trained model");
  app.footer(R"(Examples:
  tranche train --data my.txt --model gpt-mini --steps 1000
  mpirun -n 4 tranche train --data my.txt --stage 3 --steps 100000 --checkpoint-dir run1 \
      --save-every 500 --keep-last 3 --resume latest
      # the same line starts and continues the run, on any number of ranks
  tranche train --data other.txt --resume-weights-only run1 --lr 1e-4 --checkpoint-dir run2
  kill -USR1 PID_OF_MPIRUN                  # save after the present step, and end)");
}

/// Checks the combinations of the flags of checkpoints.
void check_checkpoints(const Options& options) {
  const auto refuse = [](const std::string& text) { throw ConfigurationError(text); };
  if (options.checkpoint_dir.empty()) {
    for (const auto& [flag, given] :
         {std::pair("--save-every", options.save_every), std::pair("--keep-last", options.keep_last),
          std::pair("--keep-every", options.keep_every)}) {
      if (given > 0)
        refuse(fmt::format("{} {} needs --checkpoint-dir DIR, where checkpoints go", flag, given));
    }
    if (options.resume == "latest" || options.resume == "best") {
      refuse(fmt::format("--resume {} needs --checkpoint-dir DIR, where it looks; or give --resume a path",
                         options.resume));
    }
    if (options.keep_best) refuse("--keep-best needs --checkpoint-dir DIR, where checkpoints go");
    if (options.stopped_status) {
      refuse(fmt::format(
          "--stopped-status {} needs --checkpoint-dir DIR: without it a signal ends the run at once",
          *options.stopped_status));
    }
  }
  if (!options.best_by.empty() && !options.keep_best && options.resume != "best") {
    refuse(fmt::format("--best-by '{}' says by which set --keep-best keeps a checkpoint; give that too",
                       options.best_by));
  }
  if (options.resume_strict && options.resume != "latest") {
    refuse("--resume-strict says what --resume latest does with damaged checkpoints; give that too");
  }
  if (options.convert_state && options.resume.empty()) {
    refuse("--convert-state says how --resume takes optimizer state; give that too");
  }
  if ((options.partial || !options.rename.empty()) && options.resume_weights_only.empty() &&
      (options.resume.empty() || options.resumes_own())) {
    refuse(fmt::format(
        "{} says how the tensors of --resume DIR or --resume-weights-only DIR are taken; give one "
        "of them (checkpoints that --resume latest and best find are the run's own, and whole)",
        options.partial ? "--partial" : "--rename"));
  }
  (void)parse_renames(options.rename);
  if (!options.resume.empty() && options.resume != "latest" && options.resume != "best" &&
      !options.resume_weights_only.empty()) {
    refuse(fmt::format(
        "--resume '{}' and --resume-weights-only '{}' are two origins of one run; give one of them",
        options.resume, options.resume_weights_only));
  }
}

/// The innermost subcommand that was given.
const CLI::App* innermost(const CLI::App& app) {
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().front();
  return at;
}

/// "tranche checkpoint list".
std::string full_name(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name() : full_name(*app.get_parent()) + " " + app.get_name();
}

/// Flags that only rank 0 reads. They may differ between ranks, and so may hidden flags, which make single
/// ranks fail.
constexpr std::array<std::string_view, 4> flags_of_one_rank{"--report", "--metrics", "--log-every",
                                                            "--verbose"};
/// Flags whose values are paths that each rank reads or writes; nodes may have the files in different places.
constexpr std::array<std::string_view, 13> paths{
    "--base",           "--config",         "--model",    "--data",  "--validation-data",
    "--from",           "--checkpoint-dir", "--resume",   "--trace", "--resume-weights-only",
    "--memory-profile", "--tokenizer",      "--nvme-path"};

/// The command and its flags in the form that ranks compare: all flags of the parser, so that new ones are
/// included.
std::vector<Flag> comparable_flags(const CLI::App& command) {
  const auto is_in = [](const auto& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  std::vector<Flag> flags{{"the command", full_name(command)}};
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_name();
    if (name.empty() || is_in(flags_of_one_rank, name)) continue;  // hidden flags have no name
    const bool with_value = option->get_expected_max() > 0 && !is_in(paths, name);
    flags.push_back({name, option->count() == 0 ? "not given"
                           : with_value         ? fmt::format("{}", fmt::join(option->reduced_results(), " "))
                                                : "given"});
  }
  return flags;
}

/// Rephrases CLI11's text about a missing or unexpected value of a flag of the command.
std::string plain_text(const CLI::ParseError& error, const CLI::App& command) {
  const std::string text = error.what();
  if (error.get_name() == "ConversionError") {
    // The text is "Could not convert: --steps = abc"; all converted values are numbers.
    const std::size_t name = text.find(": "), value = text.find(" = ");
    if (name != std::string::npos && value != std::string::npos) {
      const std::string flag = text.substr(name + 2, value - name - 2);
      const CLI::Option* const option = command.get_option_no_throw(flag);
      // The text has all values of a flag that was given several times; the last is converted.
      const std::size_t times = option == nullptr ? 1 : option->results().size();
      const std::string given = times > 1 ? option->results().back() : text.substr(value + 3);
      char* end = nullptr;
      std::strtod(given.c_str(), &end);
      return fmt::format("{}{} '{}'{} is no {}", flag,
                         times > 1 ? fmt::format(" was given {} times, and the last,", times) : "", given,
                         times > 1 ? "," : "",
                         end != given.c_str() && *end == '\0' ? "whole number" : "number");
    }
  }
  if (error.get_name() == "ArgumentMismatch" && text.find(" missing") != std::string::npos) {
    return fmt::format("{} needs a value behind it", text.substr(0, text.find(':')));
  }
  if (error.get_name() == "RequiredError" && text.ends_with(" is required")) {
    return text.substr(0, text.size() - std::string_view(" is required").size()) + " is missing";
  }
  return text;
}

[[noreturn]] void refuse_command(const CLI::App& app, const std::string& word) {
  std::vector<std::string> known;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!command->get_group().empty()) known.push_back(command->get_name());
  }
  const std::string closest = detail::closest_match(word, known);
  throw ConfigurationError(fmt::format("'{}' is no command of {}{}; there are {}", word,
                                       app.get_parent() == nullptr ? "tranche" : "tranche " + app.get_name(),
                                       closest.empty() ? "" : " (did you mean " + closest + "?)",
                                       fmt::join(known, ", ")));
}

/// A whole number without leading zeros, which job arrays write. Throws for hexadecimal.
std::string in_decimal(const std::string& flag, std::string text) {
  const std::size_t sign = text.find_first_of("+-") == 0 ? 1 : 0;
  if (text.find_first_of("xX") == sign + 1) {
    throw ConfigurationError(fmt::format("{} is {}, but must be a decimal number", flag, text));
  }
  while (text.size() > sign + 1 && text[sign] == '0') text.erase(sign, 1);
  return text;
}

/// Checks every number of `app` and its commands before CLI11 parses it. CLI11 would read a number that is
/// too large as the largest possible one, a leading zero as octal and 0x as hexadecimal, and would accept
/// "nan".
void check_numbers(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name(), flag = option->get_name();
    if (type == "INT") {
      // Job arrays write numbers with leading zeros, which are decimal all the same.
      option->transform([flag](const std::string& text) { return in_decimal(flag, text); });
      option->check([flag](const std::string& text) {
        std::int64_t number = 0;
        const char* const begin = text.data() + (text.starts_with('+') ? 1 : 0);
        const auto [end, error] = std::from_chars(begin, text.data() + text.size(), number);
        if (error != std::errc::result_out_of_range || end != text.data() + text.size()) return std::string();
        throw ConfigurationError(
            fmt::format("{} is {}, but must be between {} and {}", flag, text,
                        text.starts_with('-') ? std::numeric_limits<std::int64_t>::min() : 0,
                        std::numeric_limits<std::int64_t>::max()));
      });
    } else if (type == "FLOAT") {
      option->check([flag](const std::string& text) {
        char* end = nullptr;
        const double number = std::strtod(text.c_str(), &end);
        if (end == text.c_str() || *end != '\0') return std::string();
        const bool is_zero =
            text.substr(0, text.find_first_of("eE")).find_first_of("123456789") == std::string::npos;
        if (number == 0 && !is_zero && text.find_first_of("xX") == std::string::npos) {
          throw ConfigurationError(
              fmt::format("{} is {}, which is too small for a number; write 0 if that is meant", flag, text));
        }
        if (std::isfinite(number)) return std::string();
        throw ConfigurationError(fmt::format("{} is {}, but must be a finite number", flag, text));
      });
    }
  }
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) check_numbers(*command);
}

/// The flag that means what a flag of other programs does, or else the closest one; empty if none is close.
std::string flag_meant(std::string flag, const std::vector<std::string>& known) {
  constexpr std::pair<std::string_view, std::string_view> others[] = {
      {"--learning-rate", "--lr"},
      {"--batch-size", "--micro-batch"},
      {"--max-steps", "--steps"},
      {"--train-iters", "--steps"},
      {"--epochs", "--steps"},
      {"--num-train-epochs", "--steps"},
      {"--output-dir", "--checkpoint-dir"},
      {"--gradient-accumulation-steps", "--accumulate"},
      {"--seq-length", "--sequence"},
      {"--max-new-tokens", "--tokens"}};
  std::replace(flag.begin(), flag.end(), '_', '-');
  for (const auto& [other, ours] : others) {
    if (flag == other && std::find(known.begin(), known.end(), ours) != known.end()) return std::string(ours);
  }
  return detail::closest_match(flag, known);
}

/// Throws when arguments are left over; CLI11 keeps unknown ones.
void refuse_unknown(const CLI::App& app) {
  for (const std::string& word : app.remaining()) {
    std::string command = app.get_name();
    if (app.get_parent()->get_parent() != nullptr) command = app.get_parent()->get_name() + " " + command;
    if (word.size() < 2 || word[0] != '-') {
      throw ConfigurationError(fmt::format("'{}' is no argument of tranche {}", word, command));
    }
    const std::string flag = word.substr(0, word.find('='));
    std::vector<std::string> known;
    for (const CLI::Option* option : app.get_options()) {
      if (!option->get_group().empty() && !option->get_lnames().empty())
        known.push_back("--" + option->get_lnames().front());
    }
    const std::string closest = flag_meant(flag, known);
    throw ConfigurationError(fmt::format("unknown flag {}{}; see tranche {} --help", flag,
                                         closest.empty() ? "" : " (did you mean " + closest + "?)", command));
  }
}

/// Throws when arguments stand before the command that they are meant for; CLI11 keeps them with the command
/// above.
void refuse_before(const CLI::App& command) {
  for (const CLI::App* above = command.get_parent(); above != nullptr; above = above->get_parent()) {
    const std::vector<std::string> rest = above->remaining();
    if (rest.empty()) continue;
    throw ConfigurationError(
        fmt::format("'{}' stands before the command, but arguments are read behind it: {} {} ...",
                    rest.front(), full_name(command), rest.front()));
  }
}

/// Larger counts are typing errors, and products of two of them would overflow.
constexpr std::int64_t largest_count = 1'000'000'000;
/// The same for steps: their product with a batch does not overflow.
constexpr std::int64_t most_steps = 1'000'000'000'000;

void check(const Options& options) {
  const auto within = [](const char* flag, const auto& value, auto least, auto most) {
    if (value && !(*value >= least && *value <= most)) {
      throw ConfigurationError(
          fmt::format("{} is {}, but must be between {} and {}", flag, *value, least, most));
    }
  };
  within("--steps", options.steps, 1, most_steps);
  within("--micro-batch", options.micro_batch, 1, largest_count);
  within("--accumulate", options.accumulate, 1, largest_count);
  within("--sequence", options.sequence, 1, largest_count);
  within("--seed", options.seed, 0, std::numeric_limits<std::int64_t>::max());
  within("--threads", options.threads, 1, most_threads);
  within("--ranks", std::optional(options.ranks), 1, largest_count);
  within("--ranks-per-node", std::optional(options.ranks_per_node), 0, largest_count);
  within("--rank", options.rank, 0, largest_count);
  for (const auto& [flag, value] :
       {std::pair("--eval-every", options.eval_every), std::pair("--digest-every", options.digest_every),
        std::pair("--log-every", options.log_every), std::pair("--min-steps", options.min_steps),
        std::pair("--save-every", options.save_every), std::pair("--keep-every", options.keep_every)}) {
    within(flag, std::optional(value), 0, most_steps);
  }
  for (const auto& [flag, value] :
       {std::pair("--eval-batches", options.eval_batches.value_or(0)),
        std::pair("--sample-bytes", options.sample_bytes), std::pair("--keep-last", options.keep_last)}) {
    within(flag, std::optional(value), 0, largest_count);
  }
  within("--stopped-status", options.stopped_status, 0, 125);  // statuses from 126 on belong to the shell
  constexpr double century = 100 * 365.25 * 86400;
  within("--max-seconds", std::optional(options.max_seconds), 0.0, century);
  if (!(options.validation_fraction > 0 && options.validation_fraction < 1)) {
    throw ConfigurationError(
        fmt::format("--validation-fraction is {}, but must be between 0 and 1", options.validation_fraction));
  }
  if (!(options.calibration_seconds > 0 && options.calibration_seconds <= 3600)) {
    throw ConfigurationError(
        fmt::format("--seconds is {}, but must be above 0 and at most 3600", options.calibration_seconds));
  }
  if (options.command == Command::plan && !options.trace.empty() && options.machine.empty()) {
    throw ConfigurationError("--trace is of the step that --machine FILE has simulated; give both");
  }
  if (!options.write.empty() && !options.fit) {
    throw ConfigurationError("--write is for the configuration that --fit SIZE chooses; give both");
  }
  for (const auto& [flag, tier] : {std::pair("--offload-optimizer", options.offload_optimizer),
                                   std::pair("--offload-param", options.offload_parameters)}) {
    if (tier && *tier != "none" && *tier != "cpu" && *tier != "nvme")
      throw ConfigurationError(fmt::format("{} '{}' is not one of none, cpu, nvme", flag, *tier));
  }
  if (options.offload_ratio && !(*options.offload_ratio >= 0 && *options.offload_ratio <= 1)) {
    throw ConfigurationError(
        fmt::format("--offload-ratio is {}, but must be between 0 and 1", *options.offload_ratio));
  }
  if (options.device != "cpu" && options.device != "cuda") {
    throw ConfigurationError(fmt::format("--device '{}' is not one of cpu, cuda", options.device));
  }
}

}  // namespace

Options parse_arguments(const std::vector<std::string>& arguments, const models::ModelRegistry& models) {
  Options options;
  options.models = options.checkpoint.models = options.generate.models = models;
  Raw raw;
  CLI::App app("Trains models too large for one device. Started alone, or by mpirun -n N tranche ...",
               "tranche");
  app.formatter(std::make_shared<HelpFormatter>());  // subcommands inherit it
  app.set_version_flag("--version", std::string("tranche ") + version, "print the version");
  app.set_help_flag("-h,--help", "print this text");
  app.footer(R"(Examples:
  tranche plan --model gpt2-xl --ranks 8 --stage 3      # what would it take?
  tranche config check ds_config.json                   # which keys carry over?
  mpirun -n 4 tranche train --data my.txt --config ds_config.json --steps 1000

Exit status:
  0 success                                   5 communication, or a time-out
  1 other errors; diff: a difference          6 a numerical stop, or weights in doubt at the end
  2 flags, configuration or data              7 a scaling study with runs missing
  3 out of memory; plan: it does not fit      8 storage: a disk fails under other than checkpoints
  4 a checkpoint is damaged or missing        9 stopped by a signal: saved, and to be gone on with)");
  app.require_subcommand(0, 1);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);  // subcommands inherit it
  CLI::App* train = app.add_subcommand("train", "train a language model on text or tokens");
  add_run_flags(*train, options, raw);
  add_train_flags(*train, options);
  CLI::App* evaluate = app.add_subcommand(
      "evaluate", "validation loss of a checkpoint, or of the initial weights of --seed; n-gram entropies");
  add_run_flags(*evaluate, options, raw);
  heading(*evaluate, "Model");
  add(*evaluate, "--from", options.from, "DIR",
      "weights of this checkpoint, or of the newest in this folder of them; any number of ranks "
      "and any stage may have saved it");
  add(*evaluate, "--base", options.base, "DIR",
      "where the base of a checkpoint of adapters is (default: where it was when they were trained)");
  evaluate->footer(R"(Example:
  tranche evaluate --model gpt-mini --data my.txt --from run1)");
  CLI::App* plan = app.add_subcommand(
      "plan", "memory, traffic and work of a run before it is started, on any machine; what fits a budget");
  add_model_flags(*plan, options);
  add_plan_flags(*plan, options);
  CLI::App* calibrate = app.add_subcommand(
      "calibrate", "measures what this machine computes and moves in a second, for plan --machine");
  add_calibrate_flags(*calibrate, options);
  CLI::App* scale = app.add_subcommand(
      "scale", "a scaling study: runs over ranks and stages, to a table and plots; starts mpirun itself");
  const std::vector<std::string> study_flags = add_study_flags(*scale, options, raw);
  ScaleTexts scale_texts;
  add_scale_flags(*scale, options.scale, scale_texts);
  heading(*scale, "Output");
  scale->add_flag("--json", options.json, "print the results as JSON instead of the table");
  CLI::App* config = add_config_command(app, options.config_check);
  CLI::App* schedule = add_schedule_command(app, options.schedule);
  CLI::App* info = app.add_subcommand("info", "what this build and machine offer");
  info->add_flag("--json", options.json, "as JSON");
  add(*info, "--mesh", options.mesh, "AXES",
      "axes of ranks, like 'replicate=2, shard=*': each rank's place on them");
  add_number(*info, "--ranks", options.ranks, "ranks of the mesh, 1 to 65536")->capture_default_str();
  CLI::App* checkpoint = add_checkpoint_command(app, options.checkpoint);
  CLI::App* generate = add_generate_command(app, options.generate);
  CLI::App* tokenize = add_tokenize_command(app, options.tokenize);
  ShellOptions shell;
  add_shell_commands(app, shell);
  for (CLI::App* command : {&app, train, evaluate, plan, config, calibrate, scale, schedule, info, checkpoint,
                            generate, tokenize})
    command->allow_extras()->prefix_command(false);
  check_numbers(app);

  std::vector<std::string> own = arguments;
  options.scale.launcher_arguments = take_launcher_arguments(own);
  try {
    std::vector<std::string> reversed(own.rbegin(), own.rend());
    app.parse(reversed);
  } catch (const CLI::CallForVersion&) {
    options.text = std::string("tranche ") + version + "\n";
    return options;
  } catch (const CLI::Success&) {
    const CLI::App* asked = innermost(app);
    std::string above;
    for (const CLI::App* app_above = asked->get_parent(); app_above != nullptr;
         app_above = app_above->get_parent())
      above = app_above->get_name() + (above.empty() ? "" : " ") + above;
    options.text = asked->help(above);
    return options;
  } catch (const CLI::ParseError& error) {
    throw ConfigurationError(
        fmt::format("{}; see {} --help", plain_text(error, *innermost(app)), full_name(*innermost(app))));
  }
  if (app.get_subcommands().empty()) {
    const std::vector<std::string> rest = app.remaining();
    if (rest.empty())
      throw ConfigurationError(fmt::format("which command? there are {}; see tranche --help", commands_text));
    refuse_command(app, rest.front());
  }
  refuse_before(*innermost(app));
  const CLI::App* used = app.get_subcommands().front();
  if (shell.used) {
    refuse_unknown(*used);
    options.text = shell_text(app, shell, models);
    return options;
  }
  options.command = used == train        ? Command::train
                    : used == evaluate   ? Command::evaluate
                    : used == generate   ? Command::generate
                    : used == tokenize   ? Command::tokenize
                    : used == plan       ? Command::plan
                    : used == calibrate  ? Command::calibrate
                    : used == scale      ? Command::scale
                    : used == checkpoint ? Command::checkpoint
                    : used == config     ? Command::config
                    : used == schedule   ? Command::schedule
                                         : Command::info;
  if (used == checkpoint && options.checkpoint.action == CheckpointAction::none) {
    const std::vector<std::string> rest = used->remaining();
    if (rest.empty() || rest.front().starts_with("-"))
      throw ConfigurationError(
          "which of list, verify, show, export, import and diff? see tranche checkpoint --help");
    refuse_command(*checkpoint, rest.front());
  }
  if (used == config && config->get_subcommands().empty()) {
    const std::vector<std::string> rest = used->remaining();
    if (rest.empty() || rest.front().starts_with("-"))
      throw ConfigurationError("which of check? see tranche config --help");
    refuse_command(*config, rest.front());
  }
  if (used == scale) refuse_flags_of_train(used->remaining());
  refuse_unknown(*innermost(*used));
  options.flags = comparable_flags(*innermost(*used));
  options.notes = repeated_flags(*innermost(*used));
  options.sets_before = sets_before_flags(*innermost(*used));
  refuse_home_sign(*innermost(*used));
  refuse_empty(*innermost(*used));
  if (used == scale) {
    check(options.scale, scale_texts);
    options.scale.train_flags = given_flags(*scale, study_flags);
  }
  if (used == checkpoint) check(options.checkpoint);
  if (used == config) check(options.config_check);
  if (used == schedule) check(options.schedule);
  if (used == generate) check(options.generate);
  if (!raw.debug_fail.empty()) options.fail = parse_fault(raw.debug_fail, "--debug-fail");
  if (!raw.debug_hang.empty()) options.hang = parse_fault(raw.debug_hang, "--debug-hang");
  if (!raw.debug_out_of_memory.empty()) {
    options.out_of_memory = parse_fault(raw.debug_out_of_memory, "--debug-out-of-memory", 0);
  }
  options.data = fmt::format("{}", fmt::join(options.data_sources, " "));
  check(options);
  check_checkpoints(options);
  return options;
}

}  // namespace tranche::tools
