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

constexpr std::string_view file_suffix = ".safetensors";

}  // namespace

Shape shape_of(const SafeTensor& tensor, const std::string& path) {
  try {
    return Shape(tensor.shape);
  } catch (const InvalidArgument& problem) {
    throw CheckpointError(fmt::format("{}: tensor {}: {}", path, tensor.name, problem.message()));
  }
}

bool is_hugging_face(detail::FileSystem& files, const std::string& path) {
  if (path.ends_with(file_suffix)) return true;
  return files.exists(detail::join_path(path, "model.safetensors")) ||
         files.exists(detail::join_path(path, "model.safetensors.index.json"));
}

HuggingFaceModel::HuggingFaceModel(detail::FileSystem& files, std::string path, const std::string& model,
                                   const models::ModelRegistry& models)
    : path_(std::move(path)), folder_(files, path_) {
  const std::string text = folder_.config();
  const std::string folder = path_.ends_with(file_suffix) ? detail::parent_path(path_) : path_;
  const std::string origin = model.empty() ? detail::join_path(folder, "config.json") : model;
  if (!model.empty()) {
    model_ = models.resolve(model);
  } else if (!text.empty()) {
    model_ = models.from_json(text, origin);
  } else {
    throw ConfigurationError(fmt::format(
        "there is no config.json in {}, so what model it is of is not known: give --model a preset or a file",
        folder));
  }
  std::vector<NamedShape> found;
  for (const SafeTensor& tensor : folder_.tensors()) {
    const std::string name = model_->tensor_of(tensor.name);
    if (name.empty()) continue;
    if (tensor.dtype != "F32" && tensor.dtype != "BF16" && tensor.dtype != "F16") {
      throw CheckpointError(
          fmt::format("{}: tensor {} is {}; F32, BF16 and F16 are read", path_, tensor.name, tensor.dtype));
    }
    const auto [at, added] = tensors_.emplace(name, &tensor);
    if (!added) {
      throw CheckpointError(fmt::format("{}: {} and {} are the same tensor of the model", path_,
                                        at->second->name, tensor.name));
    }
    found.push_back({name, shape_of(tensor, path_)});
  }
  require_tensors(*model_, origin, found, path_);
  const ModelSpec spec = model_->spec(model_->shape().positions);
  for (const UnitSpec& unit : spec.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      for (const std::string& alias : tensor.aliases) {
        if (const auto at = tensors_.find(alias); at != tensors_.end())
          require_equal(*at->second, *tensors_.at(tensor.name));
      }
    }
  }
}

void HuggingFaceModel::require_equal(const SafeTensor& alias, const SafeTensor& tensor) const {
  constexpr std::int64_t stride = std::int64_t{1} << 18;
  std::vector<float> a(static_cast<std::size_t>(stride)), b(a.size());
  bool same = alias.shape == tensor.shape;
  for (std::int64_t at = 0; same && at < alias.elements; at += stride) {
    const detail::ElementRange range{at, std::min(at + stride, alias.elements)};
    folder_.read(alias, range, DataType::float32, a.data());
    folder_.read(tensor, range, DataType::float32, b.data());
    same = std::memcmp(a.data(), b.data(), static_cast<std::size_t>(range.size()) * sizeof(float)) == 0;
  }
  if (same) return;
  throw CheckpointError(
      fmt::format("{}: {} is not equal to {}: a tensor of its own, while the model has one for both", path_,
                  alias.name, tensor.name));
}

void HuggingFaceModel::read(const std::string& tensor, detail::ElementRange elements, DataType dtype,
                            void* memory) const {
  const auto found = tensors_.find(tensor);
  if (found == tensors_.end()) throw InvalidArgument("there is no tensor " + tensor + " in " + path_);
  folder_.read(*found->second, elements, dtype, memory);
}

}  // namespace tranche::tools
