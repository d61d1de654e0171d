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
  std::vector<int> ranks;                  ///< rising
  std::vector<int> stages;                 ///< rising
  std::vector<std::string> meshes{""};     ///< as given; one empty: what the configuration or --mesh says
  std::vector<std::string> schedules{""};  ///< of a pipeline; one empty: what the configuration says
  bool strong = false;                     ///< the batch of a step stays, and not that of a rank
  std::int64_t repeats = 3;
  std::int64_t warmup = 3;  ///< steps of a run that are not timed
  std::int64_t steps = 10;  ///< steps of a run that are
  std::string out;
  std::string launcher = "mpirun";  ///< or srun
  std::string hostfile, host;
  std::vector<std::string> launcher_arguments;  ///< behind "--"
  std::int64_t ranks_per_node = 0;              ///< 0: as the launcher's arguments tell
  double run_timeout = 3600;                    ///< seconds
  std::vector<std::string> train_flags;         ///< as they were given: each run gets them
  std::string program;                          ///< --debug-program: what is run instead of this program
};

/// The flags' texts; check() makes numbers of them.
struct ScaleTexts {
  std::string ranks, stages = "0,1,2,3", meshes, schedules;
  bool weak = false, strong = false;
};

/// Adds what is the study's own to the subcommand, which has the flags of `train` that runs get already.
/// `options` and `texts` must outlive parsing.
void add_scale_flags(CLI::App& command, ScaleOptions& options, ScaleTexts& texts);

/// "1,2,4" in rising order. Throws ConfigurationError naming `flag` and what is wrong.
std::vector<int> parse_numbers(const std::string& text, const char* flag, const char* what, int least,
                               int most);

/// "replicate=1; replicate=2, shard=*" at the separators, in that order. Throws ConfigurationError naming
/// `flag` for an empty part and for one that is there twice; `example` says how to write them.
std::vector<std::string> parse_list(const std::string& text, const char* flag, char separator,
                                    const char* example);

/// Those of the arguments of `tranche scale` behind the first "--", which are the launcher's; they are taken
/// off.
std::vector<std::string> take_launcher_arguments(std::vector<std::string>& arguments);

/// The flags of `names` that were given to the subcommand, as a command line has them.
std::vector<std::string> given_flags(const CLI::App& command, const std::vector<std::string>& names);

/// Throws ConfigurationError for flags of `train`, among what the parser did not know, that a study has no
/// room for.
void refuse_flags_of_train(const std::vector<std::string>& unknown);
/// Throws ConfigurationError for what was parsed but cannot be.
void check(ScaleOptions& options, const ScaleTexts& texts);

}  // namespace tranche::tools
