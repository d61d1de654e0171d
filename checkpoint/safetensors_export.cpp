#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "checkpoint/folder.h"
#include "checkpoint/safetensors.h"
#include "offload/aligned_buffer.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t piece_bytes = std::int64_t{4} << 20;

struct Entry {
  const ExportTensor* tensor = nullptr;
  std::int64_t bytes = 0;
};

std::vector<Entry> entries_of(const std::vector<ExportTensor>& tensors, DataType dtype) {
  std::vector<Entry> entries;
  std::unordered_set<std::string> names;
  for (const ExportTensor& tensor : tensors) {
    if (!names.insert(tensor.name).second)
      throw InvalidArgument(fmt::format("two tensors are exported as '{}'", tensor.name));
    entries.push_back({&tensor, tensor.shape.elements() * size_of(dtype)});
  }
  return entries;
}

/// Divides the entries into files of at most `largest` bytes; a file has at least one tensor. Within a file
/// tensors are sorted by name, as safetensors' own writer sorts tensors of one dtype, so that importing and
/// exporting a folder reproduces its bytes.
std::vector<std::vector<Entry>> cut(const std::vector<Entry>& entries, std::int64_t largest) {
  std::vector<std::vector<Entry>> files(1);
  std::int64_t bytes = 0;
  for (const Entry& entry : entries) {
    if (!files.back().empty() && bytes + entry.bytes > largest) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += entry.bytes;
    files.back().push_back(entry);
  }
  for (std::vector<Entry>& file : files) {
    std::sort(file.begin(), file.end(),
              [](const Entry& a, const Entry& b) { return a.tensor->name < b.tensor->name; });
  }
  return files;
}

std::string header_of(const std::vector<Entry>& entries, DataType dtype) {
  Json json = {{"__metadata__", {{"format", "pt"}}}};
  std::int64_t at = 0;
  for (const Entry& entry : entries) {
    const auto extents = entry.tensor->shape.extents();
    json[entry.tensor->name] = {{"dtype", dtype == DataType::float32 ? "F32" : "BF16"},
                                {"shape", std::vector<std::int64_t>(extents.begin(), extents.end())},
                                {"data_offsets", {at, at + entry.bytes}}};
    at += entry.bytes;
  }
  std::string text = json.dump();
  text.resize(static_cast<std::size_t>(round_up(static_cast<std::int64_t>(text.size()), 8)), ' ');
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 255);
  return length + text;
}

/// Checks that the folder has no other content under the names of small files to be written.
void require_no_others(detail::FileSystem& files, const std::string& folder, const ExportOptions& options) {
  const auto require = [&](const std::string& name, const std::string& text) {
    const std::string path = detail::join_path(folder, name);
    if (!files.exists(path) || files.read_file(path, companion_limit) == text) return;
    throw CheckpointError(
        fmt::format("it holds {} already, with other contents: name an empty folder", name));
  };
  for (const Companion& companion : options.beside) require(companion.name, companion.bytes);
  if (!options.config_json.empty()) require(options.config_name, options.config_json);
}

class Exporter {
 public:
  Exporter(Storage storage, std::string folder, const ExportOptions& options)
      : storage_(storage),
        folder_(std::move(folder)),
        dtype_(options.dtype),
        progress_(options.progress),
        piece_(storage.memory, piece_bytes, Category::other, "safetensors export") {}

  void write(const std::string& name, const std::vector<Entry>& entries) {
    const std::string path = detail::join_path(folder_, name);
    const std::string temporary = detail::temporary_name(path);
    auto file = storage_.files.open(temporary, detail::OpenMode::create_new);
    try {
      write(*file, entries);
      file.reset();
      storage_.files.rename(temporary, path);
    } catch (...) {
      try {
        storage_.files.remove(temporary);
      } catch (const IoError&) {  // only the first failure is reported
      }
      throw;
    }
  }

 private:
  void write(detail::File& file, const std::vector<Entry>& entries) {
    const std::string header = header_of(entries, dtype_);
    file.write(0, header.data(), static_cast<std::int64_t>(header.size()));
    auto at = static_cast<std::int64_t>(header.size());
    const std::int64_t most = piece_bytes / size_of(dtype_);
    for (const Entry& entry : entries) {
      const std::int64_t elements = entry.tensor->shape.elements();
      for (std::int64_t begin = 0; begin < elements; begin += most) {
        const std::int64_t end = std::min(begin + most, elements);
        entry.tensor->read({begin, end}, dtype_, piece_.data());
        file.write(at, piece_.data(), (end - begin) * size_of(dtype_));
        at += (end - begin) * size_of(dtype_);
        if (progress_) progress_((end - begin) * size_of(dtype_));
      }
    }
    file.sync();
  }

  Storage storage_;
  std::string folder_;
  DataType dtype_;
  const std::function<void(std::int64_t)>& progress_;
  detail::AlignedBuffer piece_;
};

}  // namespace

ExportSummary export_safetensors(Reader& reader, Storage storage, const std::string& folder,
                                 const ExportOptions& options) {
  std::vector<ExportTensor> tensors;
  for (const StoredTensor& tensor : reader.tensors()) {
    std::string name = options.rename ? options.rename(tensor.name) : tensor.name;
    if (name.empty()) continue;
    tensors.push_back(
        {std::move(name), tensor.shape, [&](detail::ElementRange elements, DataType dtype, void* memory) {
           reader.read_tensor(tensor.name, "weight", elements, dtype, memory);
         }});
  }
  return export_safetensors(tensors, reader.folder(), storage, folder, options);
}

ExportSummary export_safetensors(const std::vector<ExportTensor>& tensors, const std::string& what,
                                 Storage storage, const std::string& folder, const ExportOptions& options) {
  if (options.dtype != DataType::float32 && options.dtype != DataType::bfloat16) {
    throw InvalidArgument(
        fmt::format("export in {}: safetensors are written in fp32 or bf16", name_of(options.dtype)));
  }
  ExportSummary summary;
  const auto files = cut(entries_of(tensors, options.dtype), options.largest_file);
  with_reason(fmt::format("cannot export {} to {}", what, folder), [&] {
    if (const std::string within = enclosing_checkpoint(storage.files, folder); !within.empty()) {
      throw CheckpointError(within + " is a checkpoint: name another folder");
    }
    storage.files.create_directories(folder);
    if (!list_checkpoints(storage.files, folder).empty()) {
      throw CheckpointError("it holds the checkpoints of a run: name another folder");
    }
    for (const detail::DirectoryEntry& entry : storage.files.list(folder)) {
      if (entry.name.ends_with(".safetensors") || entry.name.ends_with(".safetensors.index.json")) {
        throw CheckpointError(fmt::format("it holds {} already: name an empty folder", entry.name));
      }
    }
    require_no_others(storage.files, folder, options);
    Exporter exporter(storage, folder, options);
    nlohmann::json map = nlohmann::json::object();  // sorted by name over all files
    for (std::size_t f = 0; f < files.size(); ++f) {
      const std::string name =
          files.size() == 1 ? options.stem + ".safetensors"
                            : fmt::format("{}-{:05}-of-{:05}.safetensors", options.stem, f + 1, files.size());
      exporter.write(name, files[f]);
      summary.files.push_back(name);
      for (const Entry& entry : files[f]) {
        map[entry.tensor->name] = name;
        summary.bytes += entry.bytes;
        ++summary.tensors;
      }
    }
    storage.files.sync_directory(folder);
    if (files.size() > 1) {
      const Json index = {{"metadata", {{"total_size", summary.bytes}}}, {"weight_map", map}};
      summary.files.push_back(options.stem + ".safetensors.index.json");
      storage.files.replace_file(detail::join_path(folder, summary.files.back()), index.dump(2) + "\n");
    }
    for (const Companion& companion : options.beside) {
      summary.files.push_back(companion.name);
      storage.files.replace_file(detail::join_path(folder, companion.name), companion.bytes);
    }
    if (!options.config_json.empty()) {
      summary.files.push_back(options.config_name);
      storage.files.replace_file(detail::join_path(folder, options.config_name), options.config_json);
    }
  });
  return summary;
}

}  // namespace tranche::checkpoint
