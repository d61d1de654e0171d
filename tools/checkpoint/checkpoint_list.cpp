// tranche checkpoint list.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "checkpoint/folder.h"
#include "tools/checkpoint/checkpoint_command.h"
#include "tranche/core/error.h"
#include "tranche/device/ledger.h"
#include "tranche/training/checkpoint_schedule.h"

namespace tranche::tools {

using checkpoint::Listed;
using detail::FileSystem;
using detail::join_path;
using nlohmann::ordered_json;

namespace {

/// The content of the file `latest`, or its problem.
struct Latest {
  std::string name;  ///< the folder's name; empty if the file is missing or damaged
  std::string problem;
};

Latest read_latest(FileSystem& files, const std::string& folder, const std::vector<Listed>& found) {
  const std::string path = join_path(folder, std::string(checkpoint::latest_name));
  if (!files.exists(path)) return {"", found.empty() ? "" : path + " is missing"};
  Latest latest;
  try {
    latest.name = checkpoint::parse_latest(files.read_file(path, checkpoint::small_file_bytes));
  } catch (const IoError& problem) {
    latest.problem = fmt::format("{}: {}", path, problem.message());
    return latest;
  }
  if (latest.name.empty()) {
    latest.problem = path + " is damaged";
  } else if (!files.exists(join_path(folder, latest.name))) {
    latest.problem = fmt::format("{} names {}, which is not there", path, latest.name);
  }
  return latest;
}

std::vector<std::string> saves_under_way(FileSystem& files, const std::string& folder) {
  std::vector<std::string> names;
  for (const detail::DirectoryEntry& entry : files.list(folder)) {
    if (entry.is_directory && entry.name.ends_with(".tmp") &&
        checkpoint::parse_step_name(entry.name.substr(0, entry.name.find('.'))) >= 0) {
      names.push_back(entry.name);
    }
  }
  return names;
}

/// The step of its state, which a renamed folder's name does not tell.
std::int64_t step_of(const Listed& listed) {
  return listed.manifest ? listed.manifest->run.step : listed.step;
}

ordered_json json_of(const Listed& listed, const std::vector<Listed>& found) {
  ordered_json json = {{"name", base_name(listed.path)},
                       {"path", listed.path},
                       {"step", step_of(listed)},
                       {"complete", listed.complete()}};
  if (listed.manifest) {
    const checkpoint::Manifest& manifest = *listed.manifest;
    json.update(ordered_json{{"sequence", manifest.sequence},
                             {"created", manifest.created},
                             {"world", manifest.layout.world},
                             {"stage", manifest.stage},
                             {"bytes", manifest.bytes()}});
  }
  if (!listed.complete()) json["problem"] = listed.problem;
  if (listed.complete() && checkpoint::in_doubt(listed, found)) json["in_doubt"] = true;
  return json;
}

}  // namespace

int checkpoint_list(const CheckpointOptions& options, const Output& output) {
  FileSystem& files = detail::posix_file_system();
  const std::string& folder = options.path;
  std::vector<Listed> found;
  Latest latest;
  std::vector<std::string> unfinished;
  std::optional<training::BestCheckpoint> best;
  checkpoint::with_reason("cannot list checkpoints in " + folder, [&] {
    const auto status = files.status(folder);
    if (!status) throw CheckpointError("there is no such folder");
    if (!status->is_directory) throw CheckpointError("it is a file");
    if (files.exists(join_path(folder, std::string(checkpoint::manifest_name)))) {
      throw CheckpointError(
          "it is a checkpoint itself; see tranche checkpoint show, or list the folder that it is in");
    }
    found = checkpoint::list_checkpoints(files, folder);
    latest = read_latest(files, folder, found);
    unfinished = saves_under_way(files, folder);
    best = training::best_checkpoint(folder);
  });
  const std::string newest = !found.empty() && found.front().complete() ? base_name(found.front().path) : "";
  if (options.json) {
    ordered_json list = ordered_json::array();
    for (const Listed& listed : found) list.push_back(json_of(listed, found));
    const auto name_or_null = [](const std::string& name) {
      return name.empty() ? ordered_json() : ordered_json(name);
    };
    const ordered_json json = {{"folder", folder},
                               {"newest", name_or_null(newest)},
                               {"latest", name_or_null(latest.name)},
                               {"best", best ? ordered_json{{"name", base_name(best->path)},
                                                            {"step", best->step},
                                                            {"set", best->set},
                                                            {"loss", best->loss}}
                                             : ordered_json()},
                               {"latest_problem", name_or_null(latest.problem)},
                               {"unfinished", unfinished},
                               {"checkpoints", list}};
    output.out << json.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
    return 0;
  }
  if (found.empty()) {
    output.out << "there are no checkpoints in " << folder << "\n";
  } else {
    output.out << fmt::format("{:<10} {:>8}  {:<19}  {:>5} {:>5}  {:>10}  {}\n", "step", "sequence",
                              "saved (UTC)", "ranks", "stage", "size", "state");
  }
  for (const Listed& listed : found) {
    const std::string name = base_name(listed.path);
    if (!listed.complete()) {
      output.out << fmt::format("{:<10} {:>8}  {:<19}  {:>5} {:>5}  {:>10}  not complete: {}\n", listed.step,
                                "-", "-", "-", "-", "-", listed.problem);
      continue;
    }
    const checkpoint::Manifest& manifest = *listed.manifest;
    output.out << fmt::format(
        "{:<10} {:>8}  {:<19}  {:>5} {:>5}  {:>10}  complete{}{}{}{}\n", step_of(listed), manifest.sequence,
        format_time(manifest.created), manifest.layout.world, manifest.stage, format_bytes(manifest.bytes()),
        name == newest ? ", the newest" : "",
        checkpoint::in_doubt(listed, found) ? ", in doubt: the weights may be ruined" : "",
        name == latest.name ? ", 'latest'" : "",
        best && listed.path == best->path
            ? fmt::format(", the best: loss {:.4f} on {}", best->loss, best->set)
            : "");
  }
  for (const std::string& name : unfinished) {
    output.out << name << ": a save under way, or what is left of one\n";
  }
  if (!latest.problem.empty()) {
    output.out << "note: " << latest.problem
               << "; --resume latest looks at the folders and takes the newest\n";
  }
  return 0;
}

}  // namespace tranche::tools
