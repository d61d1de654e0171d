#include "tools/checkpoint/checkpoint_source.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unordered_map>

#include "checkpoint/storage.h"
#include "tools/checkpoint/adapters.h"
#include "tools/train/resume_source.h"
#include "tranche/core/error.h"

namespace tranche::tools {

std::string some_of(const std::vector<std::string>& names) {
  constexpr std::size_t most = 5;
  const std::vector<std::string> shown(
      names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(most, names.size())));
  std::string text = fmt::format("{}", fmt::join(shown, ", "));
  if (names.size() > most) text += fmt::format(" and {} more", names.size() - most);
  return text;
}

std::string find_checkpoint(detail::FileSystem& files, const std::string& path,
                            std::vector<std::string>& notes) {
  std::string found;
  checkpoint::with_reason("cannot open checkpoint " + path, [&] {
    std::string folder = path;
    while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
    auto status = files.status(folder);
    if (!status) throw CheckpointError("there is nothing of this name");
    if (!status->is_directory) {
      if (!folder.ends_with(checkpoint::latest_name)) throw CheckpointError("it is a file, not a folder");
      folder = detail::parent_path(folder);
    }
    found = folder;
    if (files.exists(detail::join_path(folder, std::string(checkpoint::manifest_name)))) return;
    found = checkpoint::newest_checkpoint(files, folder, notes).path;
    const std::string best = note_on_best(folder, found);
    if (!best.empty()) notes.push_back(best);
  });
  return found;
}

RunIdentity identity_of(const checkpoint::Manifest& manifest, const std::string& path,
                        const std::string& model, const models::ModelRegistry& models) {
  RunIdentity identity;
  const bool known = RunIdentity::wrote(manifest.run.user);
  if (known) identity = RunIdentity::from_json(manifest.run.user, path, models);
  if (!model.empty()) {
    if (!known) return identity_of(models.resolve(model));
    identity.model = models.resolve(model);
  } else if (!known) {
    throw CheckpointError(
        fmt::format("{} does not say which model it holds (tranche train writes it; another program saved "
                    "this): give --model "
                    "a preset or a config.json",
                    path));
  }
  return identity;
}

RunIdentity identity_of(std::shared_ptr<const models::LanguageModel> model) {
  RunIdentity identity;
  identity.model = std::move(model);
  const models::ModelShape shape = identity.model->shape();
  identity.sequence = shape.positions;
  if (shape.vocabulary != 256) identity.tokenizer = {Tokenizer::Kind::tokens, shape.vocabulary};
  return identity;
}

std::string TensorDifferences::to_string() const {
  std::string text;
  if (!missing.empty()) text += fmt::format("; the model has, but it does not: {}", some_of(missing));
  if (!extra.empty()) text += fmt::format("; it has, but the model does not: {}", some_of(extra));
  if (!shapes.empty()) text += fmt::format("; other shapes in it than in the model: {}", some_of(shapes));
  return text;
}

TensorDifferences compare_tensors(const models::LanguageModel& model, std::string_view model_origin,
                                  const std::vector<NamedShape>& found, std::string_view found_origin) {
  const std::int64_t layers = model.shape().layers;
  // Each layer has its own tensors, so the layout of a model that claims more layers than tensors is not
  // computed.
  if (layers > static_cast<std::int64_t>(found.size())) {
    throw CheckpointError(
        fmt::format("{} does not hold the model of {}: it has {} tensors, the model {} layers", found_origin,
                    model_origin, found.size(), layers));
  }
  return compare_tensors(model.spec(model.shape().positions), found);
}

TensorDifferences compare_tensors(const ModelSpec& spec, const std::vector<NamedShape>& found) {
  std::unordered_map<std::string, const Shape*> left;
  for (const NamedShape& tensor : found) left.emplace(tensor.name, &tensor.shape);
  TensorDifferences differences;
  for (const UnitSpec& unit : spec.units()) {
    for (const TensorSpec& wanted : unit.tensors) {
      const auto at = left.find(wanted.name);
      if (at == left.end()) {
        differences.missing.push_back(wanted.name);
        continue;
      }
      if (!(*at->second == wanted.shape)) {
        differences.shapes.push_back(fmt::format("{} is {} and not {}", wanted.name, at->second->to_string(),
                                                 wanted.shape.to_string()));
      }
      left.erase(at);
      for (const std::string& alias : wanted.aliases) left.erase(alias);
    }
  }
  for (const NamedShape& tensor : found) {
    if (left.count(tensor.name) > 0) differences.extra.push_back(tensor.name);
  }
  return differences;
}

namespace {

void refuse(const TensorDifferences& differences, std::string_view model_origin,
            std::string_view found_origin) {
  if (!differences.any()) return;
  throw CheckpointError(
      fmt::format("{} does not hold the model of {}{}", found_origin, model_origin, differences.to_string()));
}

}  // namespace

void require_tensors(const models::LanguageModel& model, std::string_view model_origin,
                     const std::vector<NamedShape>& found, std::string_view found_origin) {
  refuse(compare_tensors(model, model_origin, found, found_origin), model_origin, found_origin);
}

void require_tensors(const ModelSpec& spec, std::string_view model_origin,
                     const std::vector<NamedShape>& found, std::string_view found_origin) {
  refuse(compare_tensors(spec, found), model_origin, found_origin);
}

void require_tensors(const models::LanguageModel& model, std::string_view model_origin,
                     const checkpoint::Reader& reader) {
  if (adapters_of(reader.manifest()).any()) return require_adapters(model, model_origin, reader);
  std::vector<NamedShape> found;
  for (const checkpoint::StoredTensor& tensor : reader.tensors())
    found.push_back({tensor.name, tensor.shape});
  require_tensors(model, model_origin, found, reader.folder());
}

}  // namespace tranche::tools
