#pragma once
/// Reads a Hugging Face folder as one of our models. The layouts are the same, so weights are copied
/// unchanged; names come from LanguageModel::tensor_of().

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "tranche/models/model_registry.h"

namespace tranche::tools {

/// True when the path is a safetensors file or a folder with such files, rather than a checkpoint.
bool is_hugging_face(detail::FileSystem& files, const std::string& path);
/// The shape of a tensor in the file `path`. Throws CheckpointError naming both if it is not a valid Shape.
Shape shape_of(const checkpoint::SafeTensor& tensor, const std::string& path);

/// The differences that are allowed between a folder and the model.
struct TensorsTaken {
  bool partial = false;  ///< tensors may be missing or additional
  /// Renames of the folder's names, as in LoadOptions::renames.
  std::vector<std::pair<std::string, std::string>> renames = {};
};

class HuggingFaceModel {
 public:
  /// Opens the folder and checks everything except the values. `model` (a preset or a config.json) replaces
  /// the folder's config.json; `models` reads either. A tensor may appear under a second name (lm_head.weight
  /// of a tied head) with equal values. Throws CheckpointError naming both sides for tensors that are
  /// missing, additional or have other shapes or dtypes, unless `taken` allows it; ConfigurationError for a
  /// config.json that is missing or has another architecture.
  HuggingFaceModel(detail::FileSystem& files, std::string path, const std::string& model,
                   const models::ModelRegistry& models, const TensorsTaken& taken = {});

  const std::shared_ptr<const models::LanguageModel>& model() const noexcept { return model_; }
  const std::string& path() const noexcept { return path_; }
  /// The names of the files that hold its tensors.
  const std::vector<std::string>& files_read() const noexcept { return folder_.files_read(); }
  /// The folder of its files: the path itself, or its parent if it is a file.
  std::string folder() const;
  /// The dtype of its weights, "F32"; if they are mixed, of the first tensor.
  const std::string& dtype() const noexcept { return folder_.tensors().front().dtype; }
  /// A line for each tensor that is renamed, missing or skipped.
  const std::vector<std::string>& differences() const noexcept { return differences_; }
  /// False for a missing tensor of the model, by our name.
  bool has(const std::string& tensor) const { return tensors_.contains(tensor); }
  /// Reads elements of a tensor, by our name.
  void read(const std::string& tensor, detail::ElementRange elements, DataType dtype, void* memory) const;

 private:
  /// Fills in tensors_ and differences_.
  void take_tensors(const std::string& origin, const TensorsTaken& taken);
  void require_equal(const checkpoint::SafeTensor& alias, const checkpoint::SafeTensor& tensor) const;

  std::string path_;
  checkpoint::SafetensorsFolder folder_;
  std::shared_ptr<const models::LanguageModel> model_;
  std::unordered_map<std::string, const checkpoint::SafeTensor*> tensors_;  ///< by our names
  std::vector<std::string> differences_;
};

}  // namespace tranche::tools
