#include "tools/checkpoint/hugging_face.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "checkpoint/renames.h"
#include "tools/checkpoint/checkpoint_source.h"
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
                                   const models::ModelRegistry& models, const TensorsTaken& taken)
    : path_(std::move(path)), folder_(files, path_) {
  const std::string text = folder_.config();
  const std::string origin = model.empty() ? detail::join_path(folder(), "config.json") : model;
  if (!model.empty()) {
    model_ = models.resolve(model);
  } else if (!text.empty()) {
    model_ = models.from_json(text, origin);
  } else {
    throw ConfigurationError(fmt::format(
        "there is no config.json in {}, so what model it is of is not known: give --model a preset or a file",
        folder()));
  }
  take_tensors(origin, taken);
  const ModelSpec spec = model_->spec(model_->shape().positions);
  for (const UnitSpec& unit : spec.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      for (const std::string& alias : tensor.aliases) {
        if (tensors_.contains(alias) && has(tensor.name)) {
          require_equal(*tensors_.at(alias), *tensors_.at(tensor.name));
        }
      }
    }
  }
}

std::string HuggingFaceModel::folder() const {
  return path_.ends_with(file_suffix) ? detail::parent_path(path_) : path_;
}

void HuggingFaceModel::take_tensors(const std::string& origin, const TensorsTaken& taken) {
  checkpoint::Renames renames(taken.renames);
  std::vector<NamedShape> found;
  std::vector<std::string> stored_names;
  for (const SafeTensor& tensor : folder_.tensors()) {
    stored_names.push_back(tensor.name);
    const std::string renamed = renames.apply(tensor.name), name = model_->tensor_of(renamed);
    if (renamed != tensor.name) {
      differences_.push_back(fmt::format("tensor {} of {}: renamed {}", tensor.name, path_, renamed));
    }
    if (name.empty()) continue;
    const auto [at, added] = tensors_.emplace(name, &tensor);
    if (!added) {
      throw CheckpointError(fmt::format("{}: {} and {} are the same tensor of the model", path_,
                                        at->second->name, tensor.name));
    }
    found.push_back({name, shape_of(tensor, path_)});
  }
  renames.require_used(path_, stored_names);
  const TensorDifferences differences = compare_tensors(*model_, origin, found, path_);
  if (!differences.shapes.empty() || (!taken.partial && differences.any())) {
    throw CheckpointError(
        fmt::format("{} does not hold the model of {}{}; {}", path_, origin, differences.to_string(),
                    taken.partial ? "one of another shape is left out by --rename NAME=unused.NAME"
                                  : "tranche checkpoint import --partial takes the tensors that both have"));
  }
  if (differences.extra.size() == found.size()) {
    throw CheckpointError(
        fmt::format("{} holds no tensor of the model of {}{}", path_, origin, differences.to_string()));
  }
  for (const std::string& name : differences.missing) {
    differences_.push_back(fmt::format("tensor {} is not in {}", name, path_));
  }
  for (const std::string& name : differences.extra) {
    differences_.push_back(fmt::format("tensor {} of {}: passed over, the model has none of this name",
                                       tensors_.at(name)->name, path_));
    tensors_.erase(name);
  }
  for (const NamedShape& tensor : found) {
    const auto at = tensors_.find(tensor.name);
    if (at == tensors_.end()) continue;
    const SafeTensor& one = *at->second;
    if (one.dtype != "F32" && one.dtype != "BF16" && one.dtype != "F16") {
      throw CheckpointError(
          fmt::format("{}: tensor {} is {}; F32, BF16 and F16 are read", path_, one.name, one.dtype));
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
