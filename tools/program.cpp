#include "tools/program.h"

#include <fmt/format.h>

#include <optional>
#include <ostream>

#include "tools/checkpoint/checkpoint_command.h"
#include "tools/config_command.h"
#include "tools/generate.h"
#include "tools/info.h"
#include "tools/plan/calibrate.h"
#include "tools/plan/plan.h"
#include "tools/scale/scale.h"
#include "tools/schedule/schedule_command.h"
#include "tools/tokenize.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

/// A plan in a job of mpirun, which one process alone may make.
int plan_alone(const Options& options, const Output& output) {
  Launch launch(output.errors, options.flags);
  int status = 0;
  const int failed = launch.agree([&] {
    if (launch.size() > 1) {
      throw ConfigurationError(
          "tranche plan runs on one process: start it without mpirun (--ranks says how many ranks to plan)");
    }
    status = run_plan(options, output);
  });
  return failed != 0 ? failed : status;
}

}  // namespace

int run_program(const std::vector<std::string>& arguments, const Output& output,
                const models::ModelRegistry& models) {
  Options options;
  try {
    options = parse_arguments(arguments, models);
    // The other commands print it with their other output; standard output may have to be JSON.
    const bool alone = options.command == Command::plan || options.command == Command::scale ||
                       options.command == Command::checkpoint || options.command == Command::config ||
                       options.command == Command::info || options.command == Command::calibrate ||
                       options.command == Command::schedule;
    for (const std::string& note : options.notes) {
      if (alone) output.errors << "note: " << note << "\n";
    }
    if (options.command == Command::info) {
      constexpr int most_ranks = 65536;  // one line each
      if (options.ranks > most_ranks) {
        throw ConfigurationError(
            fmt::format("--ranks is {}; the mesh of at most {} is shown", options.ranks, most_ranks));
      }
      options.text =
          info_text(options.json,
                    options.mesh ? std::optional(Mesh::parse(*options.mesh, options.ranks)) : std::nullopt);
    }
    if (options.command == Command::plan && !started_by_mpi_launcher()) return run_plan(options, output);
    if (options.command == Command::scale) return run_scale(options, output);
  } catch (...) {
    // All ranks read the same arguments, so under mpirun only one prints the error.
    const auto error = std::current_exception();
    Launch launch(output.errors, options.flags);
    return launch.agree([&error] { std::rethrow_exception(error); });
  }
  if (!options.text.empty()) {
    Launch launch(output.errors, {{"the command", "help or info"}});
    return launch.agree([&] {
      if (launch.rank() == 0) output.out << options.text << std::flush;
    });
  }
  if (options.command == Command::plan) return plan_alone(options, output);
  if (options.command == Command::config) return run_config(options, output);
  if (options.command == Command::schedule) return run_schedule(options, output);
  if (options.command == Command::checkpoint) return run_checkpoint(options, output);
  if (options.command == Command::calibrate) return run_calibrate(options, output);
  if (options.command == Command::tokenize) return run_tokenize(options, output);
  if (options.command == Command::generate) return run_generate(options, output);
  return options.command == Command::evaluate ? run_evaluate(options, output) : run_train(options, output);
}

}  // namespace tranche::tools
