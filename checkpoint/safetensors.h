#pragma once
/// Folders as Hugging Face transformers reads and writes them: model.safetensors (or several and an index)
/// and config.json. Both directions stream: memory holds a few MiB, whatever the model's size.

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
  /// Small files that are written as they are. A file of such a name, or of config.json's, that is in the
  /// folder with other contents is refused.
  Companions beside = {};
  std::int64_t largest_file = 5'000'000'000;  ///< bytes of tensors in one file; a larger tensor has its own
  /// The name a tensor gets, or "" to leave it out; absent: its own. Tied tensors are written once, by their
  /// first name, as transformers does.
  std::function<std::string(const std::string&)> rename;
  std::function<void(std::int64_t)> progress;  ///< told how many bytes more of tensors are written
};

/// A tensor to be exported, wherever it comes from.
struct ExportTensor {
  std::string name;
  Shape shape;
  /// Writes elements to memory in a dtype.
  std::function<void(detail::ElementRange, DataType, void*)> read;
};

struct ExportSummary {
  std::vector<std::string> files;  ///< names in the folder, config.json and index included
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;  ///< of tensors
};

/// Writes all weights of a checkpoint. Files appear under their names when they are whole and durable, the
/// index, the files beside them and config.json last; a file whose writing fails is removed. Throws
/// CheckpointError when the folder holds safetensors files already, does not take the files, or the
/// checkpoint is damaged; InvalidArgument for other dtypes and names used twice.
ExportSummary export_safetensors(Reader& reader, Storage storage, const std::string& folder,
                                 const ExportOptions& options);
/// The same of tensors from anywhere; `rename` is not asked. `what` is named in errors.
ExportSummary export_safetensors(const std::vector<ExportTensor>& tensors, const std::string& what,
                                 Storage storage, const std::string& folder, const ExportOptions& options);

/// A tensor in a safetensors file.
struct SafeTensor {
  std::string name;
  std::string dtype;  ///< as the file has it: "F32", "BF16", "I64" ...
  std::vector<std::int64_t> shape;
  std::int64_t elements = 1;
  std::size_t file = 0;    ///< index into the folder's files
  std::int64_t begin = 0;  ///< bytes of that file
  std::int64_t end = 0;
};

/// A folder or a single file, checked when it is opened: header lengths, JSON, shapes against sizes, every
/// byte of data belonging to exactly one tensor. Throws CheckpointError naming file and tensor.
class SafetensorsFolder {
 public:
  SafetensorsFolder(detail::FileSystem& files, std::string path);

  const std::vector<SafeTensor>& tensors() const noexcept { return tensors_; }
  /// nullptr when there is none.
  const SafeTensor* find(std::string_view name) const;
  /// Reads elements of an F32, BF16 or F16 tensor, in `dtype`. Throws CheckpointError for others,
  /// InvalidArgument for ranges outside the tensor.
  void read(const SafeTensor& tensor, detail::ElementRange elements, DataType dtype, void* memory) const;
  /// Text of config.json; empty when there is none.
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
};

}  // namespace tranche::checkpoint
