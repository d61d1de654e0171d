#include "tools/train/resume_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/folder.h"
#include "checkpoint/storage.h"
#include "core/closest_match.h"
#include "tools/train/config_changes.h"
#include "tranche/core/error.h"
#include "tranche/training/checkpoint_schedule.h"
#include "tranche/training/tokenizer.h"

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

/// Refuses to start in a folder with contents that an earlier run would not have left there.
void require_no_strangers(detail::FileSystem& files, const std::string& folder, const Options& options) {
  const std::vector<std::string> strangers = checkpoint::strangers_in(
      files, folder,
      {options.report, options.metrics, options.trace, options.memory_profile, options.config});
  if (strangers.empty()) return;
  constexpr std::size_t most = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(most, strangers.size()); ++i) text += "\n  " + strangers[i];
  if (strangers.size() > most) text += fmt::format("\n  and {} more", strangers.size() - most);
  throw CheckpointError(
      fmt::format("--resume {}: there is no checkpoint named step-NNNNNNNN in {}, but the folder is not "
                  "empty, and no new run is started beside files that it cannot use:{}\nrename or move "
                  "these, give --resume the path of a checkpoint, or leave --resume out to begin anew",
                  options.resume, folder, text));
}

/// The error for a --resume that names nothing, beside a folder with checkpoints.
std::string no_such_source(detail::FileSystem& files, const Options& options) {
  const std::string inside = detail::join_path(options.checkpoint_dir, options.resume);
  const std::string closest = detail::closest_match(options.resume, {"latest", "best"});
  return fmt::format("--resume '{}': there is nothing of this name{}; {}", options.resume,
                     closest.empty() ? "" : fmt::format("; did you mean '{}'?", closest),
                     files.exists(inside)
                         ? fmt::format("'{}' is there", inside)
                         : "it is a checkpoint's path, or 'latest' or 'best' of --checkpoint-dir");
}

void open_at(detail::FileSystem& files, const std::string& path, ResumeSource& resume_source,
             std::string& user) {
  checkpoint::Manifest manifest;
  resume_source.folder = path;
  if (files.exists(detail::join_path(path, std::string(checkpoint::manifest_name)))) {
    manifest = checkpoint::open_manifest(files, path);
    user = manifest.run.user;
    resume_source.config = manifest.run.config;
    return;
  }
  checkpoint::Listed newest = checkpoint::newest_checkpoint(files, path, resume_source.notes);
  resume_source.folder = newest.path;
  user = newest.manifest->run.user;
  resume_source.config = newest.manifest->run.config;
}

}  // namespace

std::string note_on_best(const std::string& folder, const std::string& taken) {
  const auto best = training::best_checkpoint(folder);
  if (!best || best->path == taken) return {};
  return fmt::format("{} is the newest checkpoint; the best, with a loss of {:.4f} on {}, is {}", taken,
                     best->loss, best->set == "validation" ? "the held-out windows" : best->set, best->path);
}

std::vector<std::string> tokenizer_folders(const Options& options, const ResumeSource& source) {
  std::vector<std::string> folders;
  if (!source.folder.empty())
    folders.push_back(detail::join_path(source.folder, std::string(checkpoint::companion_folder)));
  if (options.model.ends_with(".json")) folders.push_back(detail::parent_path(options.model));
  return folders;
}

void hold_against(const RunIdentity& present, const models::ModelRegistry& models, const std::string& user,
                  const std::string& folder, ResumeSource& resume_source) {
  resume_source.folder = folder;
  resume_source.changes.clear();
  if (!RunIdentity::wrote(user)) {
    resume_source.notes.push_back(fmt::format(
        "{} was not written by this program: its tensors are compared, its tokenizer is not known",
        resume_source.folder));
    return;
  }
  const RunIdentity saved = RunIdentity::from_json(user, resume_source.folder, models);
  resume_source.tokenizer = saved.tokenizer;
  if (resume_source.partial) {
    resume_source.changes = model_changes(saved, present);
  } else {
    require_same_model(saved, present, resume_source.folder);
  }
  if (!resume_source.weights_only) {
    require_same_tokenizer(saved, present, resume_source.folder);
    const std::vector<std::string> more = identity_changes(saved, present);
    resume_source.changes.insert(resume_source.changes.end(), more.begin(), more.end());
    return;
  }
  const std::vector<std::string> adjusted = adjusted_model(saved, present);
  resume_source.changes.insert(resume_source.changes.end(), adjusted.begin(), adjusted.end());
  // Imported weights have no data and no training sequence length.
  if (!saved.data.empty() && saved.sequence != present.sequence) {
    resume_source.notes.push_back(
        fmt::format("{} was trained on sequences of {} tokens, this run has {}: their losses cannot be "
                    "compared; --sequence {} makes them comparable",
                    resume_source.folder, saved.sequence, present.sequence, saved.sequence));
  }
  if (!(saved.tokenizer == present.tokenizer)) {
    resume_source.notes.push_back(
        fmt::format("{} was trained on {}, --data holds {}: the same numbers mean other text",
                    resume_source.folder, describe(saved.tokenizer), describe(present.tokenizer)));
  }
}

namespace {

/// A line if the model's folder has weights with which the run does not begin; empty otherwise.
std::string note_on_weights(detail::FileSystem& files, const Options& options) {
  const std::string folder =
      options.model.ends_with(".json") ? detail::parent_path(options.model) : options.model;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                           "pytorch_model.bin.index.json"}) {
    if (!files.exists(detail::join_path(folder, name))) continue;
    return fmt::format(
        "the weights are randomly initialised: {} in '{}' is not read; tranche checkpoint import {} --to "
        "BASE takes it, and {} BASE begins with it",
        name, folder, folder, options.command == Command::train ? "--resume-weights-only" : "--from");
  }
  return {};
}

/// Bytes, and a few markers such as the end of a text.
constexpr std::int64_t most_byte_tokens = 260;

/// Refuses bytes if the weights use other tokens.
void require_tokens(const Options& options, const RunIdentity& present, const ResumeSource& source) {
  const bool bytes = present.tokenizer.kind == Tokenizer::Kind::bytes;
  if (!bytes || options.data_format != "auto" || !source.tokenizer ||
      source.tokenizer->kind == Tokenizer::Kind::bytes) {
    return;
  }
  const std::vector<std::string> places = tokenizer_folders(options, source);
  const auto found = std::find_if(places.begin(), places.end(), training::has_tokenizer);
  const std::string folder = found == places.end() ? "" : *found;
  if (folder.empty() && source.tokenizer->vocabulary <= most_byte_tokens) return;
  throw ConfigurationError(
      fmt::format("{} holds bytes, but the weights of {} are of {}, whose numbers mean other text: "
                  "make such tokens first, "
                  "tranche tokenize --data FILE --tokenizer {} --out FILE.safetensors; or take the bytes all "
                  "the same with "
                  "--data-format {}",
                  options.data.empty() ? "--validation-data" : fmt::format("--data '{}'", options.data),
                  source.folder, describe(*source.tokenizer), folder.empty() ? "FOLDER" : "'" + folder + "'",
                  options.data.ends_with(".safetensors") ? "safetensors" : "text"));
}

}  // namespace

std::int64_t sequence_of_source(detail::FileSystem& files, const Options& options) {
  std::string path = options.from;
  if (!options.resume.empty()) path = options.resumes_own() ? options.checkpoint_dir : options.resume;
  if (options.resumes_own() && checkpoint::list_checkpoints(files, path).empty()) return 0;
  if (options.resume == "best") {
    const auto best = training::best_checkpoint(path, options.best_by);
    if (!best) return 0;
    path = best->path;
  }
  ResumeSource source;
  std::string user;
  open_at(files, path, source, user);
  if (!RunIdentity::wrote(user)) return 0;
  const RunIdentity saved = RunIdentity::from_json(user, source.folder, options.models);
  return saved.data.empty() ? 0 : saved.sequence;  // imported weights were not trained here
}

ResumeSource find_resume_source(detail::FileSystem& files, const Options& options,
                                const RunIdentity& present) {
  ResumeSource resume_source;
  std::string path = options.resume, user;
  if (options.resume == "latest" || options.resume == "best") {
    path = options.checkpoint_dir;
    const std::vector<checkpoint::Listed> found = checkpoint::list_checkpoints(files, path);
    for (const checkpoint::Listed& listed : found) {
      if (options.resume_strict && !listed.complete())
        throw CheckpointError("--resume-strict: " + listed.problem);
    }
    if (found.empty()) {
      require_no_strangers(files, path, options);
      path.clear();
      resume_source.notes.push_back(fmt::format("no checkpoint in {} yet: {}", options.checkpoint_dir,
                                                options.resume_weights_only.empty()
                                                    ? "training starts from the beginning"
                                                    : "training starts from --resume-weights-only"));
    } else if (options.resume == "best") {
      const auto best = training::best_checkpoint(path, options.best_by);
      if (!best) {
        throw CheckpointError(
            fmt::format("--resume best: no checkpoint in {} has a recorded loss{}; --keep-best records one "
                        "when it saves a checkpoint; --resume latest takes the newest",
                        path, options.best_by.empty() ? "" : " on '" + options.best_by + "'"));
      }
      path = best->path;
    }
  } else if (!options.checkpoint_dir.empty() && (path.empty() || !lies_in(path, options.checkpoint_dir))) {
    const auto found = checkpoint::list_checkpoints(files, options.checkpoint_dir);
    if (!found.empty()) {
      if (!path.empty() && !files.exists(path)) throw ConfigurationError(no_such_source(files, options));
      throw ConfigurationError(
          fmt::format("--checkpoint-dir '{}' holds checkpoints of an earlier run, the newest of step {}: add "
                      "--resume latest to go on with it, or give this run a folder of its own",
                      options.checkpoint_dir, found.front().step));
    }
  }
  if (!path.empty() && !options.resume_weights_only.empty()) {
    resume_source.notes.push_back(fmt::format("--resume-weights-only {} is not read: the run goes on from {}",
                                              options.resume_weights_only, path));
  }
  if (path.empty()) {
    path = options.resume_weights_only.empty() ? options.from : options.resume_weights_only;
    resume_source.weights_only = !path.empty();
  }
  if (path.empty()) {
    const std::string weights = note_on_weights(files, options);
    if (!weights.empty()) resume_source.notes.push_back(weights);
    return resume_source;
  }
  resume_source.partial = options.partial && (resume_source.weights_only || !options.resumes_own());
  checkpoint::with_reason("cannot open checkpoint " + path,
                          [&] { open_at(files, path, resume_source, user); });
  if (options.command == Command::evaluate && resume_source.folder != path) {
    const std::string best = note_on_best(path, resume_source.folder);
    if (!best.empty()) resume_source.notes.push_back(best);
  }
  hold_against(present, options.models, user, resume_source.folder, resume_source);
  require_tokens(options, present, resume_source);
  return resume_source;
}

}  // namespace tranche::tools
