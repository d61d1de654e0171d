#include "tools/origin.h"

#include <fmt/format.h>

#include <filesystem>

#include "checkpoint/folder.h"
#include "tools/config_changes.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

std::filesystem::path canonical(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::path whole = std::filesystem::weakly_canonical(path, ignored);
  return whole.has_filename() ? whole : whole.parent_path();  // a slash at the end
}

/// True when `path` is `folder` or lies in it.
bool lies_in(const std::string& path, const std::string& folder) {
  const std::filesystem::path inner = canonical(path), outer = canonical(folder);
  return inner == outer || inner.parent_path() == outer;
}

void open_at(FileSystem& files, const std::string& path, Origin& origin, std::string& user) {
  checkpoint::Manifest manifest;
  origin.folder = path;
  if (files.exists(join_path(path, std::string(checkpoint::manifest_name)))) {
    manifest = checkpoint::open_manifest(files, path);
    user = manifest.run.user;
    origin.config = manifest.run.config;
    return;
  }
  checkpoint::Listed newest = checkpoint::newest_checkpoint(files, path, origin.notes);
  origin.folder = newest.path;
  user = newest.manifest->run.user;
  origin.config = newest.manifest->run.config;
}

}  // namespace

void hold_against(const RunIdentity& present, const std::string& user, const std::string& folder,
                  Origin& origin) {
  origin.folder = folder;
  origin.changes.clear();
  if (!RunIdentity::wrote(user)) {
    origin.notes.push_back(fmt::format(
        "{} was not written by this program: its tensors are compared, its tokenizer is not known",
        origin.folder));
    return;
  }
  const RunIdentity saved = RunIdentity::from_json(user, origin.folder);
  require_same_model(saved, present, origin.folder);
  if (!origin.weights_only) {
    require_same_tokenizer(saved, present, origin.folder);
    origin.changes = identity_changes(saved, present);
  } else if (!(saved.tokenizer == present.tokenizer)) {
    origin.notes.push_back(
        fmt::format("{} was trained on {}, --data holds {}: the same numbers mean other text", origin.folder,
                    describe(saved.tokenizer), describe(present.tokenizer)));
  }
}

Origin find_origin(FileSystem& files, const Options& options, const RunIdentity& present) {
  Origin origin;
  std::string path = options.resume, user;
  if (options.resume == "latest") {
    path = options.checkpoint_dir;
    const std::vector<checkpoint::Listed> found = checkpoint::list_checkpoints(files, path);
    for (const checkpoint::Listed& listed : found) {
      if (options.resume_strict && !listed.complete())
        throw CheckpointError("--resume-strict: " + listed.problem);
    }
    if (found.empty()) {
      path.clear();
      origin.notes.push_back(fmt::format("no checkpoint in {} yet: {}", options.checkpoint_dir,
                                         options.resume_weights_only.empty()
                                             ? "training starts from the beginning"
                                             : "training starts from --resume-weights-only"));
    }
  } else if (!options.checkpoint_dir.empty() && (path.empty() || !lies_in(path, options.checkpoint_dir))) {
    const auto found = checkpoint::list_checkpoints(files, options.checkpoint_dir);
    if (!found.empty()) {
      throw ConfigurationError(
          fmt::format("--checkpoint-dir '{}' holds checkpoints of an earlier run, the newest of step {}: add "
                      "--resume latest to go on with it, or give this run a folder of its own",
                      options.checkpoint_dir, found.front().step));
    }
  }
  if (path.empty()) {
    path = options.resume_weights_only.empty() ? options.from : options.resume_weights_only;
    origin.weights_only = !path.empty();
  }
  if (path.empty()) return origin;
  open_at(files, path, origin, user);
  hold_against(present, user, origin.folder, origin);
  return origin;
}

}  // namespace tranche::tools
