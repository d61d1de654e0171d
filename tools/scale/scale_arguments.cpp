#include "tools/scale/scale_arguments.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "tools/flag_values.h"
#include "tranche/core/error.h"
#include "tranche/planner/planner.h"

namespace tranche::tools {

namespace {

/// The flags of `train` that a study does not accept, and the reasons.
constexpr std::array<std::pair<std::string_view, std::string_view>, 19> not_of_a_study{{
    {"--stage", "a study runs several: --stages 0,1,2,3"},
    {"--report", "every run of a study has its report, in the folder of --out"},
    {"--metrics", "every run of a study has its report, in the folder of --out"},
    {"--checkpoint-dir", "the runs of a study save nothing"},
    {"--save-every", "the runs of a study save nothing"},
    {"--keep-last", "the runs of a study save nothing"},
    {"--keep-every", "the runs of a study save nothing"},
    {"--resume", "every run of a study begins anew; the same command goes on with a study that was stopped"},
    {"--resume-weights-only", "every run of a study begins anew"},
    {"--max-seconds", "runs of a study have --warmup and --steps steps, so that they can be compared"},
    {"--stopped-status", "the runs of a study save nothing"},
    {"--min-steps", "runs of a study have --warmup and --steps steps, so that they can be compared"},
    {"--eval-every", "an evaluation would be in the time of a step"},
    {"--digest-every", "a digest would be in the time of a step"},
    {"--log-every", "runs write their lines into logs beside their reports"},
    {"--trace", "a trace is of one run: give it to tranche train, with the command from the log"},
    {"--memory-profile", "a profile is of one run: give it to tranche train, with the command from the log"},
    {"--sample-bytes", "it says nothing of speed"},
    {"--ngrams", "it says nothing of speed"},
}};

}  // namespace

void add_scale_flags(CLI::App& command, ScaleOptions& options, ScaleTexts& texts) {
  command.option_defaults()->group("Study");
  command.add_option("--ranks", texts.ranks, "numbers of ranks, like 1,2,4,8")->type_name("N,N...");
  command.add_option("--stages", texts.stages, "ZeRO stages")->type_name("N,N...")->capture_default_str();
  command
      .add_option("--meshes", texts.meshes,
                  "meshes to compare, like 'replicate=1; replicate=2, shard=*' (--mesh of train)")
      ->type_name("AXES;AXES...");
  command
      .add_option("--pipeline-schedules", texts.schedules,
                  "schedules of a pipeline to compare, like 1f1b,zb-h1,mine.csv (tranche.pipeline_schedule)")
      ->type_name("SCHEDULE|FILE,...");
  command.add_flag("--weak", texts.weak, "each rank keeps its batch, whatever their number (default)");
  command.add_flag("--strong", texts.strong, "a step keeps its batch: ranks share it");
  command
      .add_option("--out", options.out,
                  "folder of the study: made if need be; one that is there goes on where it stopped")
      ->type_name("DIR");
  command.add_option("--repeats", options.repeats, "runs of every point, interleaved")->capture_default_str();
  command
      .add_option("--warmup", options.warmup, "steps of a run before it is timed; the first two plan memory")
      ->capture_default_str();
  command.add_option("--steps", options.steps, "steps of a run that are timed")->capture_default_str();
  command.add_option("--run-timeout", options.run_timeout, "seconds after which a run is ended")
      ->capture_default_str();
  command.option_defaults()->group("Launcher");
  command
      .add_option("--launcher", options.launcher, "srun: with its arguments behind --, like -- --mpi=pmix")
      ->type_name("mpirun|srun")
      ->capture_default_str();
  command.add_option("--hostfile", options.hostfile, "mpirun's: hosts and their slots")->type_name("FILE");
  command.add_option("--host", options.host, "mpirun's: hosts, like a:8,b:8")->type_name("HOSTS");
  command
      .add_option("--ranks-per-node", options.ranks_per_node,
                  "where the launcher puts ranks, for the plans (default 0: as its hosts or arguments tell)")
      ->capture_default_str();
  command.add_option("--debug-program", options.program)->group("");
  command.footer(
      R"(Everything else goes to each run (tranche train --help); what follows -- goes to mpirun.
Examples:
  tranche scale --ranks 1,2,4,8 --out study
  tranche scale --ranks 8,16,32 --stages 1,3 --strong --set train_batch_size=256 --model gpt2-xl \
      --data tokens.bin --threads 8 --hostfile hosts --out study -- --map-by ppr:8:node
docs/guides/scaling.md tells what the table and the plots say.)");
}

std::vector<int> parse_numbers(const std::string& text, const char* flag, const char* what, int least,
                               int most) {
  std::vector<int> numbers;
  std::string_view rest = text;
  for (bool more = true; more;) {
    const std::size_t comma = rest.find(',');
    more = comma != std::string_view::npos;
    const std::string_view word = rest.substr(0, comma);
    rest.remove_prefix(more ? comma + 1 : rest.size());
    int number = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (word.empty() || error != std::errc() || end != word.data() + word.size() || number < least ||
        number > most) {
      throw ConfigurationError(fmt::format("{} '{}': '{}' is no {}, which is {} to {}; write them like 1,2",
                                           flag, text, word, what, least, most));
    }
    if (std::find(numbers.begin(), numbers.end(), number) != numbers.end()) {
      throw ConfigurationError(fmt::format("{} '{}' has {} twice", flag, text, number));
    }
    numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

std::vector<std::string> parse_list(const std::string& text, const char* flag, char separator,
                                    const char* example) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = text.find(separator, begin);
    std::string part = text.substr(begin, end == std::string::npos ? end : end - begin);
    part.erase(0, std::min(part.find_first_not_of(' '), part.size()));
    part.erase(part.find_last_not_of(' ') + 1);
    if (part.empty()) {
      throw ConfigurationError(fmt::format("{} '{}' has nothing on one side of a '{}'; write them like {}",
                                           flag, text, separator, example));
    }
    if (std::find(parts.begin(), parts.end(), part) != parts.end()) {
      throw ConfigurationError(fmt::format("{} '{}' has '{}' twice", flag, text, part));
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

std::vector<std::string> take_launcher_arguments(std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments.front() != "scale") return {};
  const auto mark = std::find(arguments.begin(), arguments.end(), "--");
  if (mark == arguments.end()) return {};
  std::vector<std::string> taken(mark + 1, arguments.end());
  arguments.erase(mark, arguments.end());
  return taken;
}

std::vector<std::string> given_flags(const CLI::App& command, const std::vector<std::string>& names) {
  const auto sets_before = sets_before_flags(command);
  const CLI::Option* const set = command.get_option_no_throw("--set");
  const std::size_t sets = set == nullptr ? 0 : set->count();
  std::vector<std::string> flags;
  for (std::size_t before = 0; before <= sets; ++before) {
    for (const std::string& name : names) {
      const CLI::Option* option = command.get_option_no_throw(name);
      if (option == nullptr || option == set || option->count() == 0) continue;
      const auto known = sets_before.find(name);
      if ((known == sets_before.end() ? 0 : known->second) != before) continue;
      if (option->get_expected_max() == 0) {
        flags.push_back(name);
        continue;
      }
      const bool all = option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
      const std::vector<std::string>& results = option->results();
      for (std::size_t i = all ? 0 : results.size() - 1; i < results.size(); ++i) {
        flags.push_back(name);
        flags.push_back(results[i]);
      }
    }
    if (before < sets) flags.insert(flags.end(), {"--set", set->results()[before]});
  }
  return flags;
}

void refuse_flags_of_train(const std::vector<std::string>& unknown) {
  for (const std::string& word : unknown) {
    const std::string flag = word.substr(0, word.find('='));
    for (const auto& [name, why] : not_of_a_study) {
      if (flag == name) throw ConfigurationError(fmt::format("{} is not for tranche scale: {}", name, why));
    }
  }
}

void check(ScaleOptions& options, const ScaleTexts& texts) {
  const auto refuse = [](const std::string& text) { throw ConfigurationError(text); };
  if (texts.ranks.empty()) refuse("which numbers of ranks? give --ranks, like --ranks 1,2,4,8");
  options.ranks = parse_numbers(texts.ranks, "--ranks", "number of ranks", 1, planner::most_planned_ranks);
  options.stages = parse_numbers(texts.stages, "--stages", "stage", 0, 3);
  if (!texts.meshes.empty()) {
    options.meshes = parse_list(texts.meshes, "--meshes", ';', "'replicate=1; replicate=2'");
  }
  if (!texts.schedules.empty()) {
    options.schedules = parse_list(texts.schedules, "--pipeline-schedules", ',', "1f1b,zb-h1");
  }
  if (texts.weak && texts.strong) refuse("--weak and --strong are two studies; give one of them");
  options.strong = texts.strong;
  if (options.out.empty()) refuse("where does the study go? give --out a folder");
  const auto at_least = [&](const char* flag, std::int64_t value, std::int64_t least, const char* why) {
    if (value < least) refuse(fmt::format("{} is {}, but must be at least {}{}", flag, value, least, why));
  };
  at_least("--repeats", options.repeats, 1, "");
  at_least("--warmup", options.warmup, 2, ": the first two steps plan memory");
  at_least("--steps", options.steps, 1, "");
  at_least("--ranks-per-node", options.ranks_per_node, 0, "");
  if (!(options.run_timeout > 0) || !std::isfinite(options.run_timeout)) {
    refuse(fmt::format("--run-timeout is {}, but must be above 0", options.run_timeout));
  }
  if (options.launcher != "mpirun" && options.launcher != "srun") {
    refuse(fmt::format("--launcher '{}' is not one of mpirun, srun", options.launcher));
  }
  if (options.launcher == "srun" && !(options.hostfile.empty() && options.host.empty())) {
    refuse("--hostfile and --host are mpirun's; srun takes its own arguments behind --, like -- --nodes 2");
  }
}

}  // namespace tranche::tools
