#pragma once
/// The command line of `tranche scale`.

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tranche::tools {

struct ScaleOptions {
  std::vector<int> ranks;                  ///< ascending
  std::vector<int> stages;                 ///< ascending
  std::vector<std::string> meshes{""};     ///< as given; a single empty one: from the configuration or --mesh
  std::vector<std::string> schedules{""};  ///< of a pipeline; a single empty one: from the configuration
  bool strong = false;                     ///< the batch of a step is constant, not that of a rank
  std::int64_t repeats = 3;
  std::int64_t warmup = 3;  ///< untimed steps of a run
  std::int64_t steps = 10;  ///< timed steps of a run
  std::string out;
  std::string launcher = "mpirun";  ///< or srun
  std::string hostfile, host;
  std::vector<std::string> launcher_arguments;  ///< after "--"
  std::int64_t ranks_per_node = 0;              ///< 0: from the launcher's arguments
  double run_timeout = 3600;                    ///< seconds
  std::vector<std::string> train_flags;         ///< as given; each run gets them
  std::string program;                          ///< --debug-program: run instead of this program
};

/// The flags' texts, which check() parses.
struct ScaleTexts {
  std::string ranks, stages = "0,1,2,3", meshes, schedules;
  bool weak = false, strong = false;
};

/// Adds the study's own flags to the subcommand, which already has the flags of `train` that runs receive.
/// `options` and `texts` must outlive parsing.
void add_scale_flags(CLI::App& command, ScaleOptions& options, ScaleTexts& texts);

/// Parses "1,2,4" into ascending order. Throws ConfigurationError naming `flag` and the problem.
std::vector<int> parse_numbers(const std::string& text, const char* flag, const char* what, int least,
                               int most);

/// Splits "replicate=1; replicate=2, shard=*" at the separators, keeping the order. Throws ConfigurationError
/// naming `flag` for an empty or a repeated part; `example` shows the format.
std::vector<std::string> parse_list(const std::string& text, const char* flag, char separator,
                                    const char* example);

/// Removes and returns the arguments of `tranche scale` after the first "--", which are for the launcher.
std::vector<std::string> take_launcher_arguments(std::vector<std::string>& arguments);

/// The flags of `names` that were given to the subcommand, in the form of a command line. Each stands behind
/// the same values of --set as there.
std::vector<std::string> given_flags(const CLI::App& command, const std::vector<std::string>& names);

/// Throws ConfigurationError for flags of `train`, among the unknown ones, that a study does not accept.
void refuse_flags_of_train(const std::vector<std::string>& unknown);
/// Throws ConfigurationError for values that were parsed but are invalid.
void check(ScaleOptions& options, const ScaleTexts& texts);

}  // namespace tranche::tools
