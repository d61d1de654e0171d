#pragma once
/// A folder of Hugging Face's GPT2LMHeadModel as a GPT of ours. Names and layouts are the same (Conv1D
/// stores [in, out], as our linear layers do), so weights are taken as they are.

#include <string>
#include <string_view>
#include <unordered_map>

#include "checkpoint/safetensors.h"
#include "tranche/models/gpt_config.h"

namespace tranche::tools {

/// True when the path is a safetensors file or a folder with such files, rather than a checkpoint.
bool is_hugging_face(detail::FileSystem& files, const std::string& path);

class HuggingFaceModel {
 public:
  /// Opens and checks all but the values. `model` (a preset or a config.json) replaces the folder's
  /// config.json. Names may have the prefix "transformer." or not; lm_head.weight may be there, when it is
  /// equal to the token embedding; the buffers attn.bias and attn.masked_bias (masks) are left alone. Throws
  /// CheckpointError naming both sides for tensors that are missing, too many or of other shapes or dtypes;
  /// ConfigurationError for a config.json that is no GPT-2's or is missing.
  HuggingFaceModel(detail::FileSystem& files, std::string path, const std::string& model);

  const models::GptConfig& config() const noexcept { return config_; }
  const std::string& path() const noexcept { return path_; }
  /// Dtype of its weights, "F32"; of the first tensor where they are mixed.
  const std::string& dtype() const noexcept { return folder_.tensors().front().dtype; }
  /// Elements of a tensor by our name.
  void read(const std::string& tensor, detail::ElementRange elements, DataType dtype, void* memory) const;

 private:
  void require_tied(const checkpoint::SafeTensor& head) const;

  std::string path_;
  checkpoint::SafetensorsFolder folder_;
  models::GptConfig config_;
  std::unordered_map<std::string, const checkpoint::SafeTensor*> tensors_;  ///< by our names
};

}  // namespace tranche::tools
