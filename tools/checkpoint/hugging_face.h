#pragma once
/// A folder of Hugging Face's as a model of ours. Layouts are the same, so weights are taken as they are;
/// names are LanguageModel::tensor_of()'s.

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
/// The shape of a tensor of the file `path`. Throws CheckpointError naming both where it is none.
Shape shape_of(const checkpoint::SafeTensor& tensor, const std::string& path);

/// The differences that are allowed between a folder and the model.
struct TensorsTaken {
  bool partial = false;                                           ///< tensors may be missing or too many
  std::vector<std::pair<std::string, std::string>> renames = {};  ///< of the folder's; LoadOptions::renames
};

class HuggingFaceModel {
 public:
  /// Opens and checks all but the values. `model` (a preset or a config.json) replaces the folder's
  /// config.json; `models` reads either. A second name of a tensor (lm_head.weight of a tied head) may be
  /// there, with equal values. Throws CheckpointError naming both sides for tensors that are missing, too
  /// many or of other shapes or dtypes, but for what `taken` allows; ConfigurationError for a config.json of
  /// another architecture or none.
  HuggingFaceModel(detail::FileSystem& files, std::string path, const std::string& model,
                   const models::ModelRegistry& models, const TensorsTaken& taken = {});

  const std::shared_ptr<const models::LanguageModel>& model() const noexcept { return model_; }
  const std::string& path() const noexcept { return path_; }
  /// The folder that its files are in: the path itself, unless that is a file.
  std::string folder() const;
  /// Dtype of its weights, "F32"; of the first tensor where they are mixed.
  const std::string& dtype() const noexcept { return folder_.tensors().front().dtype; }
  /// A line for each tensor that is renamed, missing or passed over.
  const std::vector<std::string>& differences() const noexcept { return differences_; }
  /// False for a tensor of the model, by our name, that is missing.
  bool has(const std::string& tensor) const { return tensors_.contains(tensor); }
  /// Elements of a tensor by our name.
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
