#include "checkpoint/folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/digest.h"
#include "checkpoint/hdf5_image.h"
#include "checkpoint/other_programs.h"
#include "core/json.h"
#include "tranche/version.h"

namespace tranche::checkpoint {

using detail::DirectoryEntry;
using detail::FileSystem;
using detail::join_path;

namespace {

constexpr std::string_view replaced_suffix = ".old";
constexpr std::string_view stale_suffix = ".tmp";

/// True for step-N.TOKEN.tmp: an unfinished save, or a checkpoint that is being removed.
bool is_stale_folder(std::string_view name) {
  const std::size_t dot = name.find('.');
  return dot != std::string_view::npos && parse_step_name(name.substr(0, dot)) >= 0 &&
         name.ends_with(stale_suffix);
}

/// True for an entry that a run may create before its first complete save: partial files, its lock, and logs,
/// reports, tables, plots and folders of them that people and programs write beside a run.
bool is_of_a_run(FileSystem& files, const std::string& parent, const DirectoryEntry& entry, int depth = 0) {
  const std::string& name = entry.name;
  if (name.starts_with('.') || name == "lost+found") return true;
  if (entry.is_directory) {
    if (is_stale_folder(name)) return true;
    constexpr int deepest = 4;
    const std::string path = join_path(parent, name);
    const std::vector<DirectoryEntry> inner = files.list(path);
    return depth < deepest && std::all_of(inner.begin(), inner.end(), [&](const DirectoryEntry& one) {
             return is_of_a_run(files, path, one, depth + 1);
           });
  }
  if (name.starts_with(lease_name) || detail::is_temporary_name(name)) return true;
  constexpr std::array<std::string_view, 4> models{"config.json", "generation_config.json", "tokenizer.json",
                                                   "tokenizer_config.json"};
  if (std::find(models.begin(), models.end(), name) != models.end() || name.ends_with(".index.json") ||
      name == manifest_name) {
    return false;
  }
  constexpr std::array<std::string_view, 14> endings{".log",   ".out", ".err", ".txt",  ".json",
                                                     ".jsonl", ".csv", ".md",  ".svg",  ".sh",
                                                     ".yaml",  ".yml", ".pid", ".trace"};
  return name == "log" || name.find(".tfevents.") != std::string::npos ||
         std::any_of(endings.begin(), endings.end(),
                     [&](std::string_view ending) { return name.ends_with(ending); });
}

/// True for step-N.old: a checkpoint that a save of the same step replaces. It is valid until the new one
/// exists.
bool is_replaced(std::string_view name) {
  return name.ends_with(replaced_suffix) &&
         parse_step_name(name.substr(0, name.size() - replaced_suffix.size())) >= 0;
}

void require_size(FileSystem& files, const std::string& folder, const FileRecord& file) {
  const std::string path = join_path(folder, file.name);
  const auto status = files.status(path);
  if (!status) throw CheckpointError(path + " is missing");
  if (status->is_directory || status->bytes != file.bytes) {
    throw CheckpointError(fmt::format("{} has {} bytes; the manifest says {}: it is {}", path, status->bytes,
                                      file.bytes, status->bytes < file.bytes ? "truncated" : "damaged"));
  }
}

/// Checkpoints of versions without lineages belong to run 0.
std::vector<std::uint64_t> lineage_of(const Manifest& manifest) {
  return manifest.lineage.empty() ? std::vector<std::uint64_t>{0} : manifest.lineage;
}

bool contains(const std::vector<std::uint64_t>& runs, std::uint64_t run) {
  return std::find(runs.begin(), runs.end(), run) != runs.end();
}

/// True when the weights of both result from equally many updates of the same runs. Skipped steps change
/// none.
bool same_weights(const Manifest& a, const Manifest& b) {
  if (a.run.applied != b.run.applied) return false;
  // Earlier versions do not record where a run branched off.
  if (a.branches.empty() || b.branches.empty()) {
    return contains(lineage_of(a), lineage_of(b).back()) || contains(lineage_of(b), lineage_of(a).back());
  }
  const auto updated_by = [](const Manifest& manifest) {
    std::vector<std::pair<std::uint64_t, std::int64_t>> runs;
    for (std::size_t i = 0; i < manifest.lineage.size(); ++i) {
      if (i == 0 || manifest.branches[i] < manifest.run.applied)
        runs.emplace_back(manifest.lineage[i], manifest.branches[i]);
    }
    return runs;
  };
  return updated_by(a) == updated_by(b);
}

std::string doubt_of(const Manifest& manifest) {
  const std::int64_t skipped = manifest.run.skipped;
  if (skipped == 0) return "they gave a loss that is not finite";
  return skipped == 1 ? "the last step before it was skipped"
                      : fmt::format("the last {} steps before it were skipped", skipped);
}

}  // namespace

std::string latest_text(std::string_view name) {
  return fmt::format("{} {}\n", name, to_hex(digest_of(name)));
}

std::string parse_latest(std::string_view text) {
  const std::size_t blank = text.find(' ');
  if (blank == std::string_view::npos) return {};
  const std::string_view name = text.substr(0, blank);
  return parse_step_name(name) >= 0 && latest_text(name) == text ? std::string(name) : std::string();
}

Manifest open_manifest(FileSystem& files, const std::string& folder) {
  const std::string path = join_path(folder, std::string(manifest_name));
  Manifest manifest;
  with_reason("no complete checkpoint in " + folder, [&] {
    if (!files.exists(path))
      throw CheckpointError(path + " is missing: the save never ended, or this is something else");
    manifest = manifest_from_text(files.read_file(path), path);
    require_size(files, folder, manifest.master);
    for (const ShardRecord& shard : manifest.shards) require_size(files, folder, shard.file);
    const std::string beside = join_path(folder, std::string(companion_folder));
    for (const FileRecord& companion : manifest.companions) require_size(files, beside, companion);
  });
  return manifest;
}

std::string enclosing_checkpoint(FileSystem& files, const std::string& folder) {
  std::error_code ignored;
  std::filesystem::path path = std::filesystem::absolute(folder, ignored).lexically_normal();
  for (; path.has_relative_path(); path = path.parent_path()) {
    const std::string name = path.string();
    if (files.exists(join_path(name, std::string(manifest_name))) &&
        files.exists(join_path(name, std::string(master_name)))) {
      return name;
    }
  }
  return {};
}

std::vector<Listed> list_checkpoints(FileSystem& files, const std::string& parent) {
  std::vector<Listed> found;
  with_reason("cannot list checkpoints in " + parent, [&] {
    if (!files.exists(parent)) return;
    const std::vector<DirectoryEntry> entries = files.list(parent);
    for (const DirectoryEntry& entry : entries) {
      std::string name = entry.name;
      if (is_replaced(name)) {
        name.resize(name.size() - replaced_suffix.size());
        // A checkpoint that was renamed for replacement is valid only until its replacement exists.
        if (std::any_of(entries.begin(), entries.end(),
                        [&](const auto& other) { return other.name == name; }))
          continue;
      }
      const std::int64_t step = parse_step_name(name);
      if (step < 0) continue;
      Listed listed{join_path(parent, entry.name), step, {}, {}};
      if (!entry.is_directory) {
        if (!files.exists(join_path(listed.path, std::string(manifest_name)))) continue;
        listed.problem =
            listed.path +
            " is a link, which is not followed here: name it by its own path, or move the folder "
            "that it names here";
        found.push_back(std::move(listed));
        continue;
      }
      try {
        listed.manifest = open_manifest(files, listed.path);
      } catch (const CheckpointError& problem) {
        listed.problem = problem.message();
      }
      found.push_back(std::move(listed));
    }
  });
  std::stable_sort(found.begin(), found.end(), [](const Listed& a, const Listed& b) {
    if (a.complete() != b.complete()) return a.complete();
    const auto sequence = [](const Listed& entry) { return entry.manifest ? entry.manifest->sequence : 0; };
    if (sequence(a) != sequence(b)) return sequence(a) > sequence(b);
    return a.step > b.step;
  });
  return found;
}

bool in_doubt(const Listed& listed, const std::vector<Listed>& found) {
  return std::any_of(found.begin(), found.end(), [&](const Listed& other) {
    return other.complete() && other.manifest->run.in_doubt &&
           same_weights(*other.manifest, *listed.manifest);
  });
}

Listed newest_checkpoint(FileSystem& files, const std::string& parent, std::vector<std::string>& notes,
                         const std::vector<std::string>& except) {
  std::vector<Listed> found = list_checkpoints(files, parent);
  // A run that prunes its folder may have removed a listed checkpoint before it was opened, so the listing is
  // repeated.
  for (int again = 0; again < 3 && !found.empty() && !found.front().complete(); ++again) {
    found = list_checkpoints(files, parent);
  }
  for (const Listed& listed : found) {
    if (!listed.complete()) notes.push_back("passed over: " + listed.problem);
  }
  const std::vector<Listed> all = found;
  std::erase_if(found, [&](const Listed& listed) {
    return !listed.complete() || std::find(except.begin(), except.end(), listed.path) != except.end();
  });
  const auto good =
      std::find_if(found.begin(), found.end(), [&](const Listed& listed) { return !in_doubt(listed, all); });
  if (good == found.end() && !found.empty()) {
    notes.push_back(
        found.front().path +
        " may have ruined weights, which gave a loss or gradient that is not finite, and there is "
        "no other checkpoint");
  } else if (good != found.end()) {
    for (auto passed = found.begin(); passed != good; ++passed) {
      notes.push_back(
          fmt::format("passed over: {}: its weights may be ruined: {}; to take it all the same, "
                      "name that folder",
                      passed->path, doubt_of(*passed->manifest)));
    }
    found.erase(found.begin(), good);
  }
  const std::string path = join_path(parent, std::string(latest_name));
  // `latest` only repeats information from the folders, so the result does not depend on reading it.
  try {
    const std::string name = files.exists(path) ? parse_latest(files.read_file(path, small_file_bytes)) : "";
    if (name.empty() && files.exists(path)) {
      // DeepSpeed writes a file of this name too.
      if (other_program_in(files, parent).empty())
        notes.push_back(path + " is damaged; it is not needed: the folders themselves are looked at");
    } else if (!name.empty() && !found.empty() && name != step_name(found.front().step) && except.empty()) {
      notes.push_back(fmt::format("{} names {}, but the newest complete checkpoint is {}", path, name,
                                  step_name(found.front().step)));
    }
  } catch (const IoError& problem) {
    notes.push_back(fmt::format("{}: {}; it is not needed: the folders themselves are looked at", path,
                                problem.message()));
  }
  if (found.empty()) {
    std::string text = "there is no complete checkpoint in " + parent;
    if (!files.exists(parent)) text += ", as there is no such folder";
    text += other_program_in(files, parent);
    for (const std::string& note : notes) text += "; " + note;
    throw CheckpointError(text);
  }
  return std::move(found.front());
}

std::vector<std::string> strangers_in(FileSystem& files, const std::string& parent,
                                      const std::vector<std::string>& own) {
  std::vector<std::string> strangers;
  with_reason("cannot list checkpoints in " + parent, [&] {
    if (!files.exists(parent)) return;
    for (const DirectoryEntry& entry : files.list(parent)) {
      const std::string path = join_path(parent, entry.name);
      const bool known = std::any_of(own.begin(), own.end(), [&](const std::string& one) {
        std::error_code ignored;
        return std::filesystem::equivalent(one, path, ignored);
      });
      if (known || is_of_a_run(files, parent, entry)) continue;
      std::string what = entry.name;
      try {
        if (entry.is_directory) {
          const std::int64_t step = open_manifest(files, path).run.step;
          what += fmt::format(": a checkpoint of step {} under another name; rename it to {}", step,
                              step_name(step));
        } else if (entry.name == latest_name) {
          const std::string name = parse_latest(files.read_file(path, small_file_bytes));
          what += name.empty() ? ": not written by this program" : fmt::format(": it names {}", name);
        }
      } catch (const Error&) {
        // The folder is no checkpoint; only its name can be reported.
      }
      strangers.push_back(std::move(what));
    }
  });
  std::sort(strangers.begin(), strangers.end());
  return strangers;
}

RunFolder::RunFolder(Storage storage, std::string parent, std::uint64_t run,
                     std::vector<std::uint64_t> ancestors, std::vector<std::int64_t> branches)
    : storage_(storage),
      parent_(std::move(parent)),
      lineage_(std::move(ancestors)),
      branches_(std::move(branches)) {
  lineage_.push_back(run);
  if (lineage_.size() == 1) branches_ = {0};
  if (!branches_.empty() && branches_.size() != lineage_.size()) {
    throw InvalidArgument(
        fmt::format("{} branches of a lineage of {} runs", branches_.size(), lineage_.size()));
  }
}

std::string RunFolder::temporary(std::int64_t step) const {
  return join_path(parent_, fmt::format("{}.{}{}", step_name(step), to_hex(lineage_.back()), stale_suffix));
}

void RunFolder::write_synced(const std::string& path, const void* bytes, std::int64_t size) {
  const auto file = storage_.files.open(path, detail::OpenMode::create_or_truncate);
  file->write(0, bytes, size);
  file->sync();
}

void RunFolder::require_held() {
  if (lease_) {
    lease_->require_held();
  } else {
    lease_.emplace(RunLease::take(parent_));
  }
}

void RunFolder::require_own(const std::string& target) {
  if (!storage_.files.exists(target)) return;
  std::vector<std::uint64_t> others;
  try {
    others = lineage_of(open_manifest(storage_.files, target));
  } catch (const CheckpointError&) {
    return;  // not a complete checkpoint, so nothing is lost
  }
  const auto own = [&](std::uint64_t run) { return contains(lineage_, run); };
  if (std::any_of(others.begin(), others.end(), own)) return;
  throw CheckpointError(target +
                        " belongs to another run, which this run does not continue: give this run a folder "
                        "of its own, or remove that checkpoint");
}

void RunFolder::remove_stale_folders(const std::string& own) {
  FileSystem& files = storage_.files;
  for (const DirectoryEntry& entry : files.list(parent_)) {
    const std::string path = join_path(parent_, entry.name);
    // An interrupted write of `latest` leaves such a file.
    if (!entry.is_directory && detail::is_temporary_name(entry.name)) files.remove(path);
    if (!entry.is_directory || path == own) continue;
    if (is_replaced(entry.name)) {
      const std::string name = entry.name.substr(0, entry.name.size() - replaced_suffix.size());
      const std::string replacing = join_path(parent_, name);
      if (files.exists(replacing)) {
        remove_folder(entry.name);
      } else {  // the save that was to replace it did not finish
        files.rename(path, replacing);
        files.sync_directory(parent_);
      }
    } else if (is_stale_folder(entry.name)) {
      files.remove_all(path);  // the process that wrote it has ended, because only the holder of the lease
                               // saves
    }
  }
}

void RunFolder::remove_folder(const std::string& name) {
  // The folder is renamed first, so that no reader takes a half-removed one for a checkpoint.
  const std::string path = join_path(parent_, name);
  const std::string stale = path + ".removed-" + to_hex(lineage_.back()) + std::string(stale_suffix);
  storage_.files.remove_all(stale);
  storage_.files.rename(path, stale);
  storage_.files.sync_directory(parent_);
  storage_.files.remove_all(stale);
}

std::int64_t RunFolder::next_sequence() {
  if (sequence_ == 0) {
    for (const Listed& listed : list_checkpoints(storage_.files, parent_)) {
      if (listed.manifest) sequence_ = std::max(sequence_, listed.manifest->sequence);
    }
  }
  return ++sequence_;
}

void RunFolder::prepare(std::int64_t step, std::int64_t total_bytes) {
  const std::string own = temporary(step);
  with_reason("cannot save step " + std::to_string(step) + " to " + parent_, [&] {
    storage_.files.create_directories(parent_);
    require_held();
    require_own(final_path(step));
    storage_.files.create_directories(own);
    remove_stale_folders(own);
    // Other ranks may have allocated their files already. These are measured after the free space: space
    // allocated in between is counted as the save's own, and cannot cause a refusal.
    std::int64_t free_bytes = storage_.files.space(parent_).free_bytes;
    for (const DirectoryEntry& entry : storage_.files.list(own)) {
      const auto status = storage_.files.status(join_path(own, entry.name));
      if (status) free_bytes += status->allocated_bytes;
    }
    if (free_bytes < total_bytes) {
      throw CheckpointError(
          fmt::format("the checkpoint needs {} bytes, but only {} are free there: remove old ones by hand "
                      "(retention removes them only after a save), or save to another file system",
                      total_bytes, free_bytes));
    }
  });
}

std::string RunFolder::commit(Manifest manifest, const MasterImage& master, const Companions& companions) {
  FileSystem& files = storage_.files;
  const std::int64_t step = manifest.run.step;
  const bool in_doubt = manifest.run.in_doubt;
  const std::string own = temporary(step);
  const std::string target = final_path(step);
  with_reason("cannot complete the checkpoint " + target + " (those before it are untouched)", [&] {
    if (static_cast<int>(manifest.shards.size()) != manifest.layout.world) {
      throw CheckpointError(fmt::format("{} of {} ranks have reported their shards", manifest.shards.size(),
                                        manifest.layout.world));
    }
    try {
      for (const ShardRecord& shard : manifest.shards) require_size(files, own, shard.file);
    } catch (const CheckpointError& problem) {
      throw CheckpointError(problem.message() + "; do all ranks see the same folder?");
    }
    const auto master_bytes = static_cast<std::int64_t>(master.bytes.size());
    write_synced(join_path(own, std::string(master_name)), master.bytes.data(), master_bytes);
    manifest.master = {std::string(master_name), master_bytes, master_bytes, block_digests(master.bytes)};
    manifest.companions = write_companions(files, own, companions);
    manifest.version = format_version;
    manifest.library = std::string(version);
    manifest.hdf5 = master.hdf5;
    manifest.sequence = next_sequence();
    manifest.lineage = lineage_;
    manifest.branches = branches_;
    manifest.created =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
            .count();
    const std::string path = join_path(own, std::string(manifest_name));
    const std::string text = to_text(manifest);
    manifest_from_text(text, path);  // a manifest that cannot be read back must not be written
    files.replace_file(path, text);
    require_held();
    const std::string replaced = target + std::string(replaced_suffix);
    const bool replaces = files.exists(target);
    if (replaces) {
      files.remove_all(replaced);
      files.rename(target, replaced);
    }
    files.rename(own, target);
    files.sync_directory(parent_);
    try {
      // `latest` names the newest checkpoint whose weights are not in doubt. A checkpoint in doubt also casts
      // doubt on earlier ones with the same weights.
      std::string newest = step_name(step);
      if (in_doubt) {
        const std::vector<Listed> found = list_checkpoints(files, parent_);
        const auto sound = std::find_if(found.begin(), found.end(), [&](const Listed& listed) {
          return listed.complete() && !checkpoint::in_doubt(listed, found);
        });
        newest = sound == found.end() ? std::string() : sound->path.substr(sound->path.rfind('/') + 1);
      }
      if (!newest.empty()) {
        files.replace_file(join_path(parent_, std::string(latest_name)), latest_text(newest));
      }
      if (replaces) remove_folder(step_name(step) + std::string(replaced_suffix));
    } catch (const IoError& problem) {
      warning_ = target + " is complete, but: " + problem.message();
    }
  });
  return target;
}

void RunFolder::discard(std::int64_t step) {
  with_reason("cannot remove what is left of the save of step " + std::to_string(step),
              [&] { storage_.files.remove_all(temporary(step)); });
}

void require_pointer(const std::string& pointer) {
  try {
    (void)nlohmann::ordered_json::json_pointer(pointer);
  } catch (const nlohmann::json::exception&) {
    throw InvalidArgument(fmt::format("'{}' is no JSON pointer, as /loss is one", pointer));
  }
}

namespace {

/// A number, and what identifies the data to which it belongs; null where that is not known.
struct Figure {
  double value = 0;
  nlohmann::ordered_json tokens, data;
  bool comparable(const Figure& other) const {
    return tokens == other.tokens && (data.is_null() || other.data.is_null() || data == other.data);
  }
};

std::optional<Figure> figure_of(const Manifest& manifest, const std::string& pointer) {
  const auto user = detail::parse_json(manifest.run.user);
  const nlohmann::ordered_json::json_pointer place(pointer);
  if (!user.is_object() || !user.contains(place) || !user[place].is_number()) return std::nullopt;
  const auto beside = [&](const char* key) {
    const auto at = place.parent_pointer() / std::string(key);
    return user.contains(at) ? user[at] : nlohmann::ordered_json();
  };
  Figure figure{user[place].get<double>(), beside("tokens"), beside("data")};
  // Earlier versions of the program wrote a loss of 0 over no tokens.
  if (figure.tokens == 0) return std::nullopt;
  return figure;
}

}  // namespace

std::optional<double> number_of(const Manifest& manifest, const std::string& pointer) {
  const std::optional<Figure> figure = figure_of(manifest, pointer);
  return figure ? std::optional(figure->value) : std::nullopt;
}

const Listed* lowest(const std::vector<Listed>& found, const std::string& pointer) {
  const Listed* chosen = nullptr;
  std::optional<Figure> newest;
  double least = 0;
  for (const Listed& listed : found) {  // the newest first
    if (!listed.complete()) continue;
    const std::optional<Figure> figure = figure_of(*listed.manifest, pointer);
    if (!figure) continue;
    if (!newest) newest = figure;
    if (!figure->comparable(*newest)) continue;
    if (chosen == nullptr || figure->value < least ||
        (figure->value == least && listed.step < chosen->step)) {
      chosen = &listed;
      least = figure->value;
    }
  }
  return chosen;
}

std::vector<std::string> RunFolder::retain(const Retention& rule) {
  std::vector<std::string> removed;
  if (rule.keep_last <= 0) return removed;
  with_reason("cannot remove old checkpoints from " + parent_, [&] {
    require_held();
    std::vector<Listed> own = list_checkpoints(storage_.files, parent_);
    std::erase_if(own, [this](const Listed& listed) {
      return !listed.complete() || !contains(lineage_, lineage_of(*listed.manifest).back());
    });
    const std::vector<Listed> all = own;  // damaged ones may cast doubt on others too
    std::erase_if(own, [&](const Listed& listed) {
      return std::any_of(rule.damaged.begin(), rule.damaged.end(), [&](const std::string& damaged) {
        std::error_code ignored;
        return std::filesystem::equivalent(damaged, listed.path, ignored);
      });
    });
    const Listed* const best = rule.keep_lowest.empty() ? nullptr : lowest(own, rule.keep_lowest);
    const auto proven = [&](const Listed& listed) {
      const RunState& run = listed.manifest->run;
      return run.skipped == 0 && run.applied < own.front().manifest->run.applied && !in_doubt(listed, all);
    };
    const auto good = rule.newest_is_proven ? own.end() : std::find_if(own.begin(), own.end(), proven);
    // The newest checkpoint whose last step was not skipped is kept, even if a later one has the same
    // weights.
    const auto taken = std::find_if(own.begin(), own.end(),
                                    [](const Listed& listed) { return listed.manifest->run.skipped == 0; });
    int rank = 0;
    for (const Listed& listed : own) {
      const bool newest = rank == 0;
      const bool recent = rank++ < rule.keep_last;
      const bool milestone = rule.keep_every > 0 && listed.step % rule.keep_every == 0;
      if (newest || recent || milestone || &listed == best) continue;
      if ((good != own.end() && &listed == &*good) || (taken != own.end() && &listed == &*taken)) continue;
      removed.push_back(listed.path.substr(listed.path.rfind('/') + 1));
      remove_folder(removed.back());
    }
  });
  return removed;
}

}  // namespace tranche::checkpoint
