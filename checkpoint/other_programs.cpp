#include "checkpoint/other_programs.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "checkpoint/folder.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

using detail::DirectoryEntry;
using detail::FileSystem;
using detail::join_path;

namespace {

constexpr const char* weight_file = "model.safetensors";
constexpr const char* weight_index = "model.safetensors.index.json";
constexpr const char* adapter_file = "adapter_config.json";

constexpr const char* rewrite =
    ": write its weights as safetensors beside a config.json, as save_pretrained() of transformers does, and "
    "import that folder with tranche checkpoint import";

constexpr std::pair<const char*, const char*> known_programs[] = {
    {"zero_to_fp32.py", "a DeepSpeed checkpoint"},
    {"mp_rank_00_model_states.pt", "a DeepSpeed checkpoint"},
    {"zero_pp_rank_0_mp_rank_00_model_states.pt", "a DeepSpeed checkpoint"},
    {"latest_checkpointed_iteration.txt", "a Megatron checkpoint"},
    {".metadata", "a checkpoint of torch.distributed"}};

/// A text about a folder of a program whose checkpoints have no name in common with ours; empty if it is
/// none.
std::string checkpoint_of_another(FileSystem& files, const std::string& folder) {
  for (const auto& [name, what] : known_programs) {
    if (files.exists(join_path(folder, name))) return fmt::format("; it holds {}, {}{}", name, what, rewrite);
  }
  return {};
}

bool has_weights(FileSystem& files, const std::string& folder) {
  for (const char* name : {weight_file, weight_index, adapter_file}) {
    if (files.exists(join_path(folder, name))) return true;
  }
  return false;
}

/// The advice on a file by its name; empty for a name that tells no format.
std::string advice_on_file(const std::string& name) {
  const auto ends = [&](std::string_view ending) { return name.ends_with(ending); };
  const auto begins = [&](std::string_view beginning) { return name.starts_with(beginning); };
  if (begins("adapter_model.") && ends(".bin")) {
    return fmt::format(
        "; {} is in PyTorch's format: open the adapters with PEFT, whose save_pretrained() writes "
        "safetensors",
        name);
  }
  if (ends(".gguf")) {
    return fmt::format(
        "; {} is in llama.cpp's format: open it with transformers' from_pretrained(FOLDER, "
        "gguf_file=\"{}\"); "
        "save_pretrained() then writes safetensors",
        name, name);
  }
  if ((begins("pytorch_model") && ends(".bin")) || ends(".h5") || ends(".msgpack")) {
    return fmt::format(
        "; {} is in another format: open the model with transformers, whose save_pretrained() writes "
        "safetensors",
        name);
  }
  if (ends(".bin") || ends(".pt") || ends(".pth") || ends(".ckpt")) {
    return fmt::format(
        "; {} is in a format that transformers does not open either: write its weights as model.safetensors, "
        "with the names and shapes of transformers' model, beside that model's config.json",
        name);
  }
  return {};
}

/// The advice on a folder that holds other folders with weights.
std::string advice_on_inner(FileSystem& files, const std::string& folder,
                            const std::vector<DirectoryEntry>& entries) {
  const auto first_in = [&](const std::string& outer, const std::vector<DirectoryEntry>& inner) {
    std::string found;
    for (const DirectoryEntry& entry : inner) {
      const std::string path = join_path(outer, entry.name);
      if (entry.is_directory && has_weights(files, path) && (found.empty() || path < found)) found = path;
    }
    return found;
  };
  const std::string snapshots = join_path(folder, "snapshots");
  const auto status = files.status(snapshots);
  std::string path = first_in(folder, entries);
  if (path.empty() && status && status->is_directory) path = first_in(snapshots, files.list(snapshots));
  return path.empty() ? path : fmt::format("; {} holds them: give that folder", path);
}

/// True if the folder is a checkpoint of this program or holds one.
bool is_own(FileSystem& files, const std::string& folder, const std::vector<DirectoryEntry>& entries) {
  if (std::any_of(entries.begin(), entries.end(), [](const DirectoryEntry& entry) {
        return entry.is_directory && parse_step_name(entry.name) >= 0;
      }))
    return true;
  try {
    (void)open_manifest(files, folder);
    return true;
  } catch (const CheckpointError&) {
    return false;
  }
}

std::string advice_on_folder(FileSystem& files, const std::string& folder) {
  std::vector<DirectoryEntry> entries = files.list(folder);
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  if (is_own(files, folder, entries)) {
    return "; it is of this program already: take it with --resume or --resume-weights-only, without an "
           "import";
  }
  for (const DirectoryEntry& entry : entries) {
    if (entry.name.ends_with(".safetensors")) {
      return fmt::format(
          "; {} is there, but not the index that lists such files: fetch the index, or name a file that "
          "holds all weights by itself",
          entry.name);
    }
  }
  if (std::string text = checkpoint_of_another(files, folder); !text.empty()) return text;
  if (std::string text = advice_on_inner(files, folder, entries); !text.empty()) return text;
  for (const DirectoryEntry& entry : entries) {
    if (std::string text = advice_on_file(entry.name); !text.empty() && !entry.is_directory) return text;
  }
  return {};
}

}  // namespace

std::string other_program_in(FileSystem& files, const std::string& folder) {
  const std::string model = fmt::format(
      "a model of Hugging Face's transformers: import it first, with 'tranche checkpoint import {} --to "
      "RUN', "
      "and give RUN here",
      folder);
  const std::string adapters = fmt::format(
      "PEFT adapters: import them first, with 'tranche checkpoint import {} --base BASE --to RUN', and "
      "give RUN here",
      folder);
  const std::pair<const char*, const std::string*> known[] = {
      {weight_file, &model}, {weight_index, &model}, {adapter_file, &adapters}};
  for (const auto& [name, what] : known) {
    if (files.exists(join_path(folder, name))) return fmt::format("; it holds {}, {}", name, *what);
  }
  if (std::string text = checkpoint_of_another(files, folder); !text.empty()) return text;
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
    if (files.exists(join_path(folder, name)))
      return fmt::format("; it holds {}, a model in PyTorch's format{}", name, rewrite);
  }
  return {};
}

std::string advice_on_import(FileSystem& files, const std::string& path) {
  const auto status = files.status(path);
  if (status && status->is_directory) return advice_on_folder(files, path);
  const std::string folder = detail::parent_path(path), name = path.substr(path.rfind('/') + 1);
  if (!status) {
    // A file of the same stem in another format, such as adapter_model.bin.
    const std::string other = name.substr(0, name.rfind('.')) + ".bin";
    return name != other && files.exists(join_path(folder, other)) ? advice_on_file(other) : "";
  }
  if (name.ends_with(".safetensors")) return {};
  if (has_weights(files, folder)) return fmt::format("; give the folder, {}", folder);
  return advice_on_file(name);
}

}  // namespace tranche::checkpoint
