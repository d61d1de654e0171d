#include "tools/hugging_face.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tools/checkpoint_source.h"
#include "tranche/core/error.h"

namespace tranche::tools {

using checkpoint::SafeTensor;

namespace {

constexpr std::string_view prefix = "transformer.";
constexpr std::string_view file_suffix = ".safetensors";
constexpr std::string_view head_name = "lm_head.weight";
constexpr const char* embedding_name = "transformer.wte.weight";

/// Masks that older versions of transformers saved with the weights.
bool is_mask(std::string_view name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

Shape shape_of(const SafeTensor& tensor, const std::string& path) {
  try {
    return Shape(tensor.shape);
  } catch (const InvalidArgument& problem) {
    throw CheckpointError(fmt::format("{}: tensor {}: {}", path, tensor.name, problem.message()));
  }
}

}  // namespace

bool is_hugging_face(detail::FileSystem& files, const std::string& path) {
  if (path.ends_with(file_suffix)) return true;
  return files.exists(detail::join_path(path, "model.safetensors")) ||
         files.exists(detail::join_path(path, "model.safetensors.index.json"));
}

HuggingFaceModel::HuggingFaceModel(detail::FileSystem& files, std::string path, const std::string& model)
    : path_(std::move(path)), folder_(files, path_) {
  const std::string text = folder_.config();
  const std::string folder = path_.ends_with(file_suffix) ? detail::parent_path(path_) : path_;
  const std::string origin = model.empty() ? detail::join_path(folder, "config.json") : model;
  if (!model.empty()) {
    config_ = models::GptConfig::resolve(model);
  } else if (!text.empty()) {
    config_ = models::GptConfig::from_json(text, origin);
  } else {
    throw ConfigurationError(fmt::format(
        "there is no config.json in {}, so what model it is of is not known: give --model a preset or a file",
        folder));
  }
  const SafeTensor* head = nullptr;
  std::vector<NamedShape> found;
  for (const SafeTensor& tensor : folder_.tensors()) {
    if (is_mask(tensor.name)) continue;
    if (tensor.dtype != "F32" && tensor.dtype != "BF16" && tensor.dtype != "F16") {
      throw CheckpointError(
          fmt::format("{}: tensor {} is {}; F32, BF16 and F16 are read", path_, tensor.name, tensor.dtype));
    }
    if (tensor.name == head_name) {
      head = &tensor;
      continue;
    }
    const std::string name =
        tensor.name.starts_with(prefix) ? tensor.name : std::string(prefix) + tensor.name;
    const auto [at, added] = tensors_.emplace(name, &tensor);
    if (!added) {
      throw CheckpointError(fmt::format("{}: {} and {} are the same tensor of the model", path_,
                                        at->second->name, tensor.name));
    }
    found.push_back({name, shape_of(tensor, path_)});
  }
  require_tensors(config_, origin, found, path_);
  if (head != nullptr) require_tied(*head);
}

void HuggingFaceModel::require_tied(const SafeTensor& head) const {
  const SafeTensor& embedding = *tensors_.at(embedding_name);
  constexpr std::int64_t stride = std::int64_t{1} << 18;
  std::vector<float> a(static_cast<std::size_t>(stride)), b(a.size());
  bool same = head.shape == embedding.shape;
  for (std::int64_t at = 0; same && at < head.elements; at += stride) {
    const detail::ElementRange range{at, std::min(at + stride, head.elements)};
    folder_.read(head, range, DataType::float32, a.data());
    folder_.read(embedding, range, DataType::float32, b.data());
    same = std::memcmp(a.data(), b.data(), static_cast<std::size_t>(range.size()) * sizeof(float)) == 0;
  }
  if (same) return;
  throw CheckpointError(fmt::format(
      "{}: {} is not equal to {}: a head of its own, while the model's is the token embedding itself", path_,
      head.name, embedding.name));
}

void HuggingFaceModel::read(const std::string& tensor, detail::ElementRange elements, DataType dtype,
                            void* memory) const {
  const auto found = tensors_.find(tensor);
  if (found == tensors_.end()) throw InvalidArgument("there is no tensor " + tensor + " in " + path_);
  folder_.read(*found->second, elements, dtype, memory);
}

}  // namespace tranche::tools
