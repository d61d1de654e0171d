// An untrusted run folder, and the commands that read such folders.

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "checkpoint/digest.h"
#include "checkpoint/folder.h"
#include "checkpoint/run_lease.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/zero_checkpoint.h"
#include "tools/checkpoint/checkpoint_command.h"
#include "tranche/models/model_registry.h"

namespace tranche::fuzz {

namespace {

using namespace checkpoint;
namespace fs = std::filesystem;

constexpr std::size_t most_parts = 16;
constexpr std::int64_t largest_file = 1 << 20;

/// A folder of this process, removed with it; in memory if the system has such a folder.
class WorkFolder {
 public:
  WorkFolder()
      : path_((fs::exists("/dev/shm") ? fs::path("/dev/shm") : fs::temp_directory_path()) /
              ("tranche-fuzz-" + std::to_string(::getpid()))) {}
  ~WorkFolder() { clear(); }
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;

  const fs::path& path() const { return path_; }
  void clear() const {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }

 private:
  fs::path path_;
};

bool is_plain(std::string_view name) {
  return !name.empty() && name.size() < 80 && name.front() != '/' &&
         name.find("..") == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

/// Writes a file. Failing because a folder with this name exists is not an error.
void write(const fs::path& path, const MemoryFiles::Content& content) {
  if (content.bytes > largest_file) return;
  std::error_code ignored;
  fs::create_directories(path.parent_path(), ignored);
  {
    std::ofstream file(path, std::ios::binary);
    for (const auto& [at, text] : content.texts) file.seekp(at) << text;
  }
  fs::resize_file(path, static_cast<std::uintmax_t>(content.bytes), ignored);
}

/// The input alternates names and contents. A valid manifest gets its other files, and its first line with
/// the digest is written here.
void fill(const fs::path& folder, std::string_view input) {
  const std::vector<std::string_view> parts = split(input, most_parts);
  for (std::size_t i = 0; i + 1 < parts.size(); i += 2) {
    if (!is_plain(parts[i])) continue;
    const fs::path path = folder / parts[i];
    std::string text(parts[i + 1]);
    if (path.filename() == manifest_name) {
      text = with_digest(text);
      try {
        for (const auto& [name, content] : zero_checkpoint(manifest_from_text(text, "")))
          write(path.parent_path() / name, content);
        continue;
      } catch (const CheckpointError&) {  // stays unchanged
      }
    }
    write(path, {static_cast<std::int64_t>(text.size()), {{0, text}}});
  }
}

void read_folder(std::string_view input) {
  static const WorkFolder work;
  work.clear();
  const fs::path folder = work.path() / "run";
  fs::create_directories(folder);
  fill(folder, input);
  std::ostringstream out, errors;
  const tools::Output output{out, errors, false};
  tools::CheckpointOptions options;
  options.path = folder;
  options.models = models::ModelRegistry::with_builtin();
  tools::checkpoint_verify(options, output);
  for (const bool json : {false, true}) {
    options.json = json;
    tools::checkpoint_list(options, output);
  }
  // A holder on another node would be observed for 30 s.
  RunLease::take(folder, {0.002, 0.004, {}}).require_held();
  for (const bool json : {false, true}) {
    options.json = json;
    tools::checkpoint_show(options, output);
  }
}

std::string latest_of(std::int64_t step) {
  const std::string name = step_name(step);
  return name + " " + to_hex(digest_of(name)) + "\n";
}

std::vector<std::string> folder_seeds() {
  Manifest older = sample_manifest(2);
  const Manifest newer = sample_manifest(1);
  older.run.step = 5;
  older.sequence = 2;
  const std::string body = without_digest(to_text(newer)), before = without_digest(to_text(older));
  const std::string holder =
      R"({"host": "a", "kernel": "b", "process": 17, "started": 4711, "token": "c", "since": 1700000000, "beat": 5})";
  return {join({"step-00000006/manifest.json", body, "latest", latest_of(6)}),
          join({"step-00000006/manifest.json", body, "step-00000005/manifest.json", before, "latest",
                latest_of(5), "step-00000007.0000000000001234.tmp/model.h5", "x", "run.lock", holder,
                "step-00000004.old/manifest.json", before}),
          join({"step-00000006/manifest.json", body, "step-00000006.old/manifest.json", before, "latest",
                "torn", "step-00000005.removed-0000000000001234.tmp/model.h5", "x"})};
}

}  // namespace

Target folder_target() {
  return {"folder", read_folder, folder_seeds, {ExitStatus::checkpoint}};
}

}  // namespace tranche::fuzz
