#include "tools/checkpoint/checkpoint_command.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>
#include <ostream>

#include "tools/checkpoint/checkpoint_source.h"
#include "tranche/core/error.h"

namespace tranche::tools {

int run_checkpoint(const Options& all_options, const Output& output) {
  const CheckpointOptions& options = all_options.checkpoint;
  Launch launch(output.errors, all_options.flags);
  int status = launch.agree([&launch] {
    if (launch.size() > 1) {
      throw ConfigurationError("tranche checkpoint runs on one process: start it without mpirun");
    }
  });
  if (status != 0) return status;
  const int failed = launch.agree([&] {
    switch (options.action) {
      case CheckpointAction::list:
        status = checkpoint_list(options, output);
        break;
      case CheckpointAction::verify:
        status = checkpoint_verify(options, output);
        break;
      case CheckpointAction::show:
        status = checkpoint_show(options, output);
        break;
      case CheckpointAction::export_folder:
        status = checkpoint_export(options, output);
        break;
      case CheckpointAction::import_folder:
        status = checkpoint_import(options, output);
        break;
      case CheckpointAction::diff:
        status = checkpoint_diff(options, output);
        break;
      case CheckpointAction::none:
        throw ConfigurationError("which of list, verify, show, export, import and diff?");
    }
  });
  output.out.flush();
  return failed != 0 ? failed : status;
}

std::string chosen_checkpoint(detail::FileSystem& files, const std::string& path, const Output& output) {
  std::vector<std::string> notes;
  const std::string found = find_checkpoint(files, path, notes);
  for (const std::string& note : notes) output.errors << "note: " << note << "\n";
  return found;
}

std::string format_time(std::int64_t seconds_since_1970) {
  return fmt::format("{:%Y-%m-%d %H:%M:%S}", fmt::gmtime(static_cast<std::time_t>(seconds_since_1970)));
}

std::string base_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

}  // namespace tranche::tools
