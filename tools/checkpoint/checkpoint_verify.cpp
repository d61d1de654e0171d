// tranche checkpoint verify.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <ostream>

#include "checkpoint/folder.h"
#include "tools/checkpoint/checkpoint_command.h"
#include "tools/terminal.h"
#include "tools/transfer_progress.h"
#include "tranche/core/error.h"

namespace tranche::tools {

using nlohmann::ordered_json;

namespace {

struct Extent {
  std::int64_t bytes = 0;
  int checkpoints = 0;
};

/// The number and bytes of all complete checkpoints to verify.
Extent extent_of(detail::FileSystem& files, const std::string& path) {
  Extent extent;
  const auto add = [&](const checkpoint::Manifest& manifest) {
    extent.bytes += manifest.bytes();
    ++extent.checkpoints;
  };
  if (files.exists(detail::join_path(path, std::string(checkpoint::manifest_name)))) {
    try {
      add(checkpoint::open_manifest(files, path));
    } catch (const CheckpointError&) {  // verify() reports it
    }
  } else {
    for (const checkpoint::Listed& listed : checkpoint::list_checkpoints(files, path)) {
      if (listed.manifest) add(*listed.manifest);
    }
  }
  return extent;
}

}  // namespace

int checkpoint_verify(const CheckpointOptions& options, const Output& output) {
  const checkpoint::LocalStorage local;
  detail::FileSystem& files = detail::posix_file_system();
  std::string path = options.path;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  Extent extent;
  checkpoint::with_reason("cannot verify " + path, [&] {
    const auto status = files.status(path);
    if (!status) throw CheckpointError("there is nothing of this name");
    if (!status->is_directory) throw CheckpointError("it is a file, not a folder");
    extent = extent_of(files, path);
  });
  const auto write = [&](std::string_view text) {
    if (!options.json) draw(output.out, text);
  };
  TransferProgress progress("verified", extent.bytes, output.terminal, write);
  const std::vector<checkpoint::Damage> found =
      checkpoint::verify(local, path, true, [&](std::int64_t bytes) { progress.add(bytes); });
  progress.finish();
  if (options.json) {
    ordered_json damage = ordered_json::array();
    for (const checkpoint::Damage& part : found) {
      damage.push_back({{"file", part.file}, {"begin", part.begin}, {"end", part.end}, {"what", part.what}});
    }
    const ordered_json json = {{"path", path},
                               {"verified", found.empty()},
                               {"checkpoints", extent.checkpoints},
                               {"bytes", progress.done()},
                               {"seconds", progress.seconds()},
                               {"damage", damage}};
    output.out << json.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
  } else {
    for (const checkpoint::Damage& part : found)
      output.out << "damaged: " << checkpoint::describe(part) << "\n";
    if (found.empty()) {
      output.out << fmt::format("{}: {} checkpoint{}, every byte as it was written ({})\n", path,
                                extent.checkpoints, extent.checkpoints == 1 ? "" : "s", progress.summary());
    }
  }
  output.out.flush();
  if (found.empty()) return 0;
  output.errors << fmt::format("tranche: {} is damaged in {} place{}\n", path, found.size(),
                               found.size() == 1 ? "" : "s");
  return static_cast<int>(ExitStatus::checkpoint);
}

}  // namespace tranche::tools
