#include "tools/checkpoint/hugging_face.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_set>
#include <vector>

#include "checkpoint/renames.h"
#include "tools/checkpoint/checkpoint_source.h"
#include "tranche/core/error.h"

namespace tranche::tools {

using checkpoint::SafeTensor;

namespace {

constexpr std::string_view file_suffix = ".safetensors";

using Rules = std::vector<std::pair<std::string, std::string>>;

/// The beginnings of a name that end with a dot, the empty one first: "", "model.", "model.layers.".
std::vector<std::string> prefixes_of(const std::string& name) {
  constexpr std::size_t most = 4;
  std::vector<std::string> prefixes{""};
  for (std::size_t dot = name.find('.'); dot != std::string::npos && prefixes.size() < most;
       dot = name.find('.', dot + 1))
    prefixes.push_back(name.substr(0, dot + 1));
  return prefixes;
}

/// The tensors under the names that the rules give them; nullopt if two get the same one.
std::optional<std::vector<NamedShape>> renamed(const std::vector<SafeTensor>& tensors, const Rules& rules,
                                               const models::LanguageModel& model, const std::string& path) {
  checkpoint::Renames renames(rules);
  std::unordered_set<std::string> names;
  std::vector<NamedShape> found;
  for (const SafeTensor& tensor : tensors) {
    const std::string name = model.tensor_of(renames.apply(tensor.name));
    if (name.empty()) continue;
    if (!names.insert(name).second) return std::nullopt;
    found.push_back({name, shape_of(tensor, path)});
  }
  return found;
}

/// The --rename flags with which the folder has every tensor of the model, under another name prefix; empty
/// if there are none. `extra` and `missing` are a name that only the folder has, as it is stored, and one
/// that only the model has. Tensors that fit already keep their names by rules of their own.
std::string prefix_advice(const std::vector<SafeTensor>& tensors, const TensorsTaken& taken,
                          const models::LanguageModel& model, const std::string& path,
                          const std::string& extra, const std::string& missing) {
  constexpr std::size_t most_kept = 4;
  if (extra.find('*') != std::string::npos) return {};  // the rule would read it as its own
  const ModelSpec spec = model.spec(model.shape().positions);
  std::unordered_set<std::string> wanted;
  for (const UnitSpec& unit : spec.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      wanted.insert(tensor.name);
      wanted.insert(tensor.aliases.begin(), tensor.aliases.end());
    }
  }
  for (const std::string& from : prefixes_of(extra)) {
    for (const std::string& to : prefixes_of(missing)) {
      if (from == to) continue;
      Rules added;
      for (const SafeTensor& tensor : tensors) {
        if (tensor.name.starts_with(from) && wanted.contains(model.tensor_of(tensor.name)))
          added.emplace_back(tensor.name, tensor.name);
      }
      if (added.size() > most_kept) continue;
      added.emplace_back(from + "*", to + "*");
      Rules rules = taken.renames;
      rules.insert(rules.end(), added.begin(), added.end());
      const auto found = renamed(tensors, rules, model, path);
      if (!found) continue;
      const TensorDifferences differences = compare_tensors(spec, *found);
      if (!differences.missing.empty() || !differences.shapes.empty()) continue;
      std::string text = "all tensors of the model are there under another name prefix: add";
      for (const auto& [name, renamed] : added) text += fmt::format(" --rename '{}={}'", name, renamed);
      return text + (differences.extra.empty() || taken.partial ? "" : " --partial");
    }
  }
  return {};
}

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
        "there is no config.json in {}, so its model is not known: give --model a preset or a file",
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
  std::string advice;
  if (!differences.missing.empty() && !differences.extra.empty()) {
    advice = prefix_advice(folder_.tensors(), taken, *model_, path_,
                           tensors_.at(differences.extra.front())->name, differences.missing.front());
  }
  if (!differences.shapes.empty() || (!taken.partial && differences.any())) {
    if (advice.empty()) {
      advice =
          taken.partial
              ? "to leave out a tensor of another shape, give it an unused name: --rename NAME=unused.NAME"
              : "tranche checkpoint import --partial takes the tensors that both have";
    }
    throw CheckpointError(fmt::format("{} does not hold the model of {}{}; {}", path_, origin,
                                      differences.to_string(), advice));
  }
  if (differences.extra.size() == found.size()) {
    throw CheckpointError(fmt::format("{} holds no tensor of the model of {}{}{}", path_, origin,
                                      differences.to_string(), advice.empty() ? "" : "; " + advice));
  }
  if (!advice.empty()) differences_.push_back(advice);
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
      fmt::format("{}: {} is not equal to {}: they are separate tensors, but the model ties them into one",
                  path_, alias.name, tensor.name));
}

void HuggingFaceModel::read(const std::string& tensor, detail::ElementRange elements, DataType dtype,
                            void* memory) const {
  const auto found = tensors_.find(tensor);
  if (found == tensors_.end()) throw InvalidArgument("there is no tensor " + tensor + " in " + path_);
  folder_.read(*found->second, elements, dtype, memory);
}

}  // namespace tranche::tools
