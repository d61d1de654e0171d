#pragma once
/// Folders in the format of Hugging Face transformers: model.safetensors (or several files and an index) and
/// config.json. Both directions stream: memory holds a few MiB, whatever the model's size.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/companions.h"
#include "checkpoint/reader.h"
#include "checkpoint/storage.h"

namespace tranche::checkpoint {

struct ExportOptions {
  DataType dtype = DataType::float32;  ///< or bfloat16, rounded to nearest even
  std::string config_json;             ///< text of config.json; empty: none is written
  std::string stem = "model";          ///< of the files' names: model.safetensors
  std::string config_name = "config.json";
  /// Small files that are written unchanged. If the folder already has a file with such a name, or
  /// config.json, with other contents, the export is refused.
  Companions beside = {};
  std::int64_t largest_file = 5'000'000'000;  ///< bytes of tensors; a larger tensor has its own file
  /// The exported name of a tensor, or "" to leave it out; absent: its own name. Tied tensors are written
  /// once, under their first name, as transformers does.
  std::function<std::string(const std::string&)> rename;
  std::function<void(std::int64_t)> progress;  ///< called with the bytes written since the last call
};

/// A tensor to export, from any source.
struct ExportTensor {
  std::string name;
  Shape shape;
  /// Writes a range of elements to memory in a dtype.
  std::function<void(detail::ElementRange, DataType, void*)> read;
};

struct ExportSummary {
  std::vector<std::string> files;  ///< names in the folder, including config.json and the index
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;  ///< total bytes of tensors
};

/// Writes all weights of a checkpoint. A file gets its name when it is whole and durable; the index, the
/// small files and config.json come last; a file whose writing fails is removed. Throws CheckpointError when
/// the folder already holds safetensors files or cannot be written, or the checkpoint is damaged;
/// InvalidArgument for other dtypes and names used twice.
ExportSummary export_safetensors(Reader& reader, Storage storage, const std::string& folder,
                                 const ExportOptions& options);
/// The same for tensors from any source; `rename` is not used. `what` is named in errors.
ExportSummary export_safetensors(const std::vector<ExportTensor>& tensors, const std::string& what,
                                 Storage storage, const std::string& folder, const ExportOptions& options);

/// A tensor in a safetensors file.
struct SafeTensor {
  std::string name;
  std::string dtype;  ///< in the file's spelling: "F32", "BF16", "I64" ...
  std::vector<std::int64_t> shape;
  std::int64_t elements = 1;
  std::size_t file = 0;    ///< index into the folder's files
  std::int64_t begin = 0;  ///< byte range in that file
  std::int64_t end = 0;
};

/// A folder or a single file. Opening it checks header lengths, JSON, shapes against sizes, and that every
/// byte of data belongs to exactly one tensor. Throws CheckpointError naming file and tensor.
class SafetensorsFolder {
 public:
  SafetensorsFolder(detail::FileSystem& files, std::string path);

  const std::vector<SafeTensor>& tensors() const noexcept { return tensors_; }
  /// The names of the files that were read.
  const std::vector<std::string>& files_read() const noexcept { return paths_; }
  /// nullptr when there is none.
  const SafeTensor* find(std::string_view name) const;
  /// A text of the files' "__metadata__" by its key, of the first file that has it; empty when there is none.
  std::string metadata(const std::string& key) const;
  /// Reads elements of an F32, BF16 or F16 tensor, in `dtype`. Throws CheckpointError for other tensors,
  /// InvalidArgument for ranges outside the tensor.
  void read(const SafeTensor& tensor, detail::ElementRange elements, DataType dtype, void* memory) const;
  /// The text of config.json; empty when there is none.
  std::string config() const;

 private:
  void open_file(const std::string& name, const std::string& path);
  void open_index(const std::string& path);

  detail::FileSystem& files_;
  std::string folder_;
  std::vector<std::string> paths_;
  std::vector<std::unique_ptr<detail::File>> open_;
  std::vector<SafeTensor> tensors_;
  std::unordered_map<std::string, std::size_t> names_;
  std::unordered_map<std::string, std::string> metadata_;
};

}  // namespace tranche::checkpoint
