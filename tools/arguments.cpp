#include "tranche/tools/arguments.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>

#include "tranche/core/error.h"
#include "tranche/engine/config.h"
#include "tranche/version.h"

namespace tranche::tools {

namespace {

/// Flags of DESIGN that this version refuses unless they ask for nothing.
struct LaterFlag {
  const char* name;
  const char* reason;
};
constexpr const char* no_offload =
    "state stays on the device in this version: raise the number of ranks or the stage";
constexpr const char* no_checkpoints =
    "checkpoints are not part of this version: a run is trained from its start";
constexpr std::array<LaterFlag, 7> later_flags{{
    {"--offload-optimizer", no_offload},
    {"--offload-param", no_offload},
    {"--nvme-path", no_offload},
    {"--checkpoint-dir", no_checkpoints},
    {"--save-every", no_checkpoints},
    {"--resume", no_checkpoints},
    {"--memory-profile", "memory by category is in the --report and, over time, in the --trace"},
}};
constexpr std::array<const char*, 4> later_commands{"generate", "plan", "scale", "checkpoint"};

Fault parse_fault(const std::string& text, const char* flag) {
  int rank = 0, used = 0;
  long long step = 0;
  if (std::sscanf(text.c_str(), "%d:%lld%n", &rank, &step, &used) != 2 ||
      static_cast<std::size_t>(used) != text.size() || rank < 0 || step < 1) {
    throw ConfigurationError(fmt::format("{} '{}' is not RANK:STEP", flag, text));
  }
  return {rank, step};
}

struct Raw {
  std::string debug_fail, debug_hang;
  std::array<std::string, later_flags.size()> later;
};

void add_run_flags(CLI::App& app, Options& options, Raw& raw) {
  app.add_option("--config", options.config, "configuration in DeepSpeed's JSON; flags override it");
  app.add_option("--model", options.model, "preset or Hugging Face config.json of a GPT-2")
      ->capture_default_str();
  app.add_option("--data", options.data, "text file (bytes), or tokens of llm.c or nanoGPT");
  app.add_option("--data-format", options.data_format, "auto, text, llmc or nanogpt")->capture_default_str();
  app.add_option("--validation-data", options.validation_data, "held-out file instead of the tail of --data");
  app.add_option("--validation-fraction", options.validation_fraction, "held-out tail of --data")
      ->capture_default_str();
  app.add_option("--stage", options.stage, "ZeRO stage: 0 to 3");
  app.add_option("--micro-batch", options.micro_batch, "sequences of a micro-batch on a rank");
  app.add_option("--accumulate", options.accumulate, "micro-batches of a step");
  app.add_option("--sequence", options.sequence,
                 "tokens of a sequence (default: all the model has positions for)");
  app.add_option("--dtype", options.dtype, "compute dtype: fp32, bf16 or fp16 (default: bf16)");
  app.add_option("--device", options.device, "cpu or cuda")->capture_default_str();
  app.add_option("--seed", options.seed, "of initial weights, order of samples, dropout (default: 1234)");
  app.add_option("--threads", options.threads, "of a rank (default: the host's cores over its ranks)");
  app.add_option("--device-memory", options.device_memory, "most memory of a rank, like 512MiB");
  app.add_option("--eval-batches", options.eval_batches,
                 "held-out windows in an evaluation, in units of the step's batch (default 0: all)");
  app.add_option("--report", options.report, "JSON report (docs/report.md)");
  app.add_flag("--ngrams", options.ngrams,
               "n-gram cross-entropies of the held-out text beside the validation loss");
  app.add_option("--set", options.set, "key.path=value of the configuration; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  app.add_option("--debug-fail", raw.debug_fail)->group("");
  app.add_option("--debug-hang", raw.debug_hang)->group("");
  for (std::size_t i = 0; i < later_flags.size(); ++i)
    app.add_option(later_flags[i].name, raw.later[i])->group("");
}

void add_train_flags(CLI::App& app, Options& options) {
  app.add_option("--steps", options.steps, "step to reach (default: tranche.total_steps, else 100)");
  app.add_option("--lr", options.learning_rate, "learning rate (default: the configuration's, else 0.001)");
  app.add_option("--max-seconds", options.max_seconds, "end training after the first step beyond these");
  app.add_option("--min-steps", options.min_steps, "least steps, whatever --max-seconds says");
  app.add_option("--eval-every", options.eval_every,
                 "steps between validations (default 0: at the end only)");
  app.add_option("--digest-every", options.digest_every,
                 "steps between digests of all weights in the report");
  app.add_option("--log-every", options.log_every,
                 "steps between progress lines in a file (default: about 50 lines)");
  app.add_option("--trace", options.trace, "timeline for Perfetto; with several ranks one file each");
  app.add_option("--sample-bytes", options.sample_bytes,
                 "print text of this many bytes from the trained model");
}

/// Throws when arguments were left over; CLI11 keeps what it does not know.
void refuse_unknown(const CLI::App& app) {
  for (const std::string& word : app.remaining()) {
    if (word.size() < 2 || word[0] != '-') {
      throw ConfigurationError(fmt::format("'{}' is no argument of tranche {}", word, app.get_name()));
    }
    const std::string flag = word.substr(0, word.find('='));
    std::vector<std::string> known;
    for (const CLI::Option* option : app.get_options()) {
      if (!option->get_group().empty()) known.push_back("--" + option->get_lnames().front());
    }
    const std::string near = nearest(flag, known);
    throw ConfigurationError(fmt::format("unknown flag {}{}; see tranche {} --help", flag,
                                         near.empty() ? "" : " (did you mean " + near + "?)",
                                         app.get_name()));
  }
}

void check(const Options& options) {
  const auto at_least = [](const char* flag, auto value, auto least) {
    if (value && *value < least)
      throw ConfigurationError(fmt::format("{} is {}, but must be at least {}", flag, *value, least));
  };
  at_least("--steps", options.steps, 1);
  at_least("--micro-batch", options.micro_batch, 1);
  at_least("--accumulate", options.accumulate, 1);
  at_least("--sequence", options.sequence, 1);
  at_least("--seed", options.seed, 0);
  at_least("--threads", options.threads, 1);
  for (const auto& [flag, value] :
       {std::pair("--eval-every", options.eval_every), std::pair("--eval-batches", options.eval_batches),
        std::pair("--digest-every", options.digest_every), std::pair("--log-every", options.log_every),
        std::pair("--sample-bytes", options.sample_bytes), std::pair("--min-steps", options.min_steps)}) {
    at_least(flag, std::optional(value), 0);
  }
  at_least("--max-seconds", std::optional(options.max_seconds), 0.0);
  if (!(options.validation_fraction > 0 && options.validation_fraction < 1)) {
    throw ConfigurationError(
        fmt::format("--validation-fraction is {}, but must be between 0 and 1", options.validation_fraction));
  }
  if (options.device != "cpu" && options.device != "cuda") {
    throw ConfigurationError(fmt::format("--device '{}' is not one of cpu, cuda", options.device));
  }
}

}  // namespace

Options parse_arguments(const std::vector<std::string>& arguments) {
  Options options;
  Raw raw;
  CLI::App app("Trains models too large for one device. Started alone, or by mpirun -n N tranche ...",
               "tranche");
  app.set_version_flag("--version", std::string("tranche ") + version);
  app.require_subcommand(0, 1);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);  // subcommands inherit it
  CLI::App* train = app.add_subcommand("train", "train a GPT on text or tokens");
  add_run_flags(*train, options, raw);
  add_train_flags(*train, options);
  CLI::App* evaluate = app.add_subcommand(
      "evaluate",
      "validation loss of the initial weights of --seed (checkpoints come later), n-gram entropies");
  add_run_flags(*evaluate, options, raw);
  CLI::App* info = app.add_subcommand("info", "what this build and machine offer");
  info->add_flag("--json", options.json, "as JSON");
  for (CLI::App* command : {&app, train, evaluate, info}) command->allow_extras()->prefix_command(false);

  try {
    std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
    app.parse(reversed);
  } catch (const CLI::CallForVersion&) {
    options.text = std::string("tranche ") + version + "\n";
    return options;
  } catch (const CLI::Success&) {
    const CLI::App* asked = app.get_subcommands().empty() ? &app : app.get_subcommands().front();
    options.text = asked->help(asked == &app ? "" : "tranche");
    return options;
  } catch (const CLI::ParseError& error) {
    throw ConfigurationError(error.what());
  }
  if (app.get_subcommands().empty()) {
    const std::vector<std::string> rest = app.remaining();
    if (rest.empty()) throw ConfigurationError("which command? train, evaluate or info; see tranche --help");
    if (std::find(later_commands.begin(), later_commands.end(), rest.front()) != later_commands.end()) {
      throw ConfigurationError(fmt::format(
          "tranche {} is not part of this version; there are train, evaluate and info", rest.front()));
    }
    const std::string near = nearest(rest.front(), {"train", "evaluate", "info"});
    throw ConfigurationError(
        fmt::format("'{}' is no command of tranche{}; there are train, evaluate and info", rest.front(),
                    near.empty() ? "" : " (did you mean " + near + "?)"));
  }
  const CLI::App* used = app.get_subcommands().front();
  options.command = used == train ? Command::train : used == evaluate ? Command::evaluate : Command::info;
  refuse_unknown(*used);
  for (std::size_t i = 0; i < later_flags.size(); ++i) {
    if (raw.later[i].empty() || raw.later[i] == "none") continue;
    throw ConfigurationError(fmt::format("{} {} cannot be honoured: {}", later_flags[i].name, raw.later[i],
                                         later_flags[i].reason));
  }
  if (!raw.debug_fail.empty()) options.fail = parse_fault(raw.debug_fail, "--debug-fail");
  if (!raw.debug_hang.empty()) options.hang = parse_fault(raw.debug_hang, "--debug-hang");
  check(options);
  return options;
}

}  // namespace tranche::tools
