#include "engine/tensor_match.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_map>

#include "checkpoint/renames.h"
#include "core/closest_match.h"
#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

using checkpoint::StoredTensor;

/// The checkpoint's tensors by all names, including aliases, under which the model looks for them.
using Named = std::unordered_map<std::string, const StoredTensor*>;

Named names_of(const checkpoint::Reader& reader, const LoadOptions& options,
               std::vector<std::string>& differences) {
  checkpoint::Renames renames(options.renames);
  Named named;
  std::vector<std::string> stored_names;
  const auto add = [&](const std::string& stored, const StoredTensor& tensor) {
    stored_names.push_back(stored);
    const std::string name = renames.apply(stored);
    const auto [at, added] = named.emplace(name, &tensor);
    if (!added && at->second != &tensor) {
      throw CheckpointError(fmt::format("tensors {} and {} of {} are both to be {}; rename one of them",
                                        at->second->name, stored, reader.folder(), name));
    }
    if (name != stored) {
      differences.push_back(fmt::format("tensor {} of {}: renamed {}", stored, reader.folder(), name));
    }
  };
  for (const StoredTensor& tensor : reader.tensors()) {
    add(tensor.name, tensor);
    const auto& unit = reader.layout().units[static_cast<std::size_t>(tensor.unit)];
    for (const std::string& alias : unit.tensors[static_cast<std::size_t>(tensor.index)].aliases) {
      add(alias, tensor);
    }
  }
  renames.require_used(reader.folder(), stored_names);
  return named;
}

/// The optimizer states of a tensor that the checkpoint lacks.
std::vector<std::string> missing_states(const FlatBuffer& flat, const checkpoint::Reader& reader,
                                        const StoredTensor& stored) {
  const std::vector<std::string> kinds = reader.kinds(stored);
  std::vector<std::string> missing;
  for (const OptimizerStateTensor& state : flat.states) {
    if (std::find(kinds.begin(), kinds.end(), state.name) == kinds.end()) missing.push_back(state.name);
  }
  return missing;
}

/// Throws for state that was saved in another format than the model's; `master` is the format of the stored
/// weights.
void require_formats(const TensorState& tensor, const FlatBuffer& flat, DataType master,
                     const checkpoint::Reader& reader, const StoredTensor& stored) {
  const std::vector<std::string> kinds = reader.kinds(stored);
  const auto require_format = [&](const std::string& kind, DataType wanted, const char* key) {
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) return;
    const DataType saved = reader.dtype(stored, kind);
    if (saved == wanted) return;
    throw CheckpointError(
        fmt::format("{} of tensor {} is in {} in {}, but in {} in this run ({}); --convert-state "
                    "(LoadOptions::convert_state) converts it",
                    kind, tensor.name, name_of(saved), reader.folder(), name_of(wanted), key));
  };
  if (!stored.frozen) require_format("weight", master, "tranche.master");
  for (const OptimizerStateTensor& state : flat.states) {
    require_format(state.name, state.dtype, "tranche.moments");
  }
}

}  // namespace

const StoredTensor* TensorMatch::source(const FlatBuffer& flat, const TensorPiece& piece,
                                        const std::string& kind) const {
  const int tensor = flat.tensors[static_cast<std::size_t>(piece.tensor)];
  const StoredTensor* found = stored[static_cast<std::size_t>(tensor)];
  if (found != nullptr && found->frozen && kind != "weight") return nullptr;
  return found;
}

TensorMatch match_tensors(const StateStore& store, const checkpoint::Reader& reader,
                          const LoadOptions& options, const std::string& optimizer, TensorsTaken wanted) {
  const std::string& folder = reader.folder();
  TensorMatch match;
  const Named named = names_of(reader, options, match.differences);
  std::vector<bool> taken(reader.tensors().size());
  for (const TensorState& tensor : store.tensors()) {
    const auto at = named.find(tensor.name);
    if (wanted != TensorsTaken::all && tensor.frozen != (wanted == TensorsTaken::frozen)) {
      match.stored.push_back(nullptr);
      if (at != named.end()) taken[static_cast<std::size_t>(at->second - reader.tensors().data())] = true;
      continue;
    }
    match.stored.push_back(at == named.end() ? nullptr : at->second);
    if (at == named.end()) {
      if (!options.partial) {
        std::vector<std::string> names;
        for (const auto& [name, stored] : named) names.push_back(name);
        std::sort(names.begin(), names.end());
        const std::string closest = closest_match(tensor.name, names);
        throw CheckpointError(fmt::format(
            "checkpoint {} has no tensor '{}'{}; a partial load (--partial) leaves it as it is", folder,
            tensor.name, closest.empty() ? "" : "; the closest match is '" + closest + "'"));
      }
      match.differences.push_back(
          fmt::format("tensor {} is not in {}: it stays as it is", tensor.name, folder));
      continue;
    }
    const StoredTensor& stored = *at->second;
    taken[static_cast<std::size_t>(at->second - reader.tensors().data())] = true;
    if (!(stored.shape == tensor.shape)) {
      throw CheckpointError(fmt::format(
          "tensor {} has shape {} in {}, but {} in this model{}", tensor.name, stored.shape.to_string(),
          folder, tensor.shape.to_string(),
          options.partial ? "; to leave it out of a partial load, give it an unused name (--rename " +
                                stored.name + "=unused." + stored.name + ")"
                          : ""));
    }
    if (tensor.frozen || options.weights_only) continue;
    if (!options.convert_state) {
      require_formats(tensor, store.buffer_of(tensor), store.residency().saved_master_type(), reader, stored);
    }
    const std::vector<std::string> missing = missing_states(store.buffer_of(tensor), reader, stored);
    if (missing.empty()) continue;
    if (!options.partial || !stored.frozen) {
      throw CheckpointError("optimizer " + optimizer + " needs " + missing.front() + " of tensor " +
                            tensor.name + ", which " + folder + " does not hold (saved by " +
                            reader.manifest().run.optimizer + "); load only the weights to start it anew");
    }
    match.differences.push_back(
        fmt::format("tensor {} was frozen in {}: its weight is taken, {} of it stays as it is", tensor.name,
                    folder, fmt::join(missing, ", ")));
  }
  for (const StoredTensor& stored : reader.tensors()) {
    if (taken[static_cast<std::size_t>(&stored - reader.tensors().data())]) continue;
    if (!options.partial) {
      const auto is_adapter = [](const std::string& name) {
        return name.find(".lora_A.") != std::string::npos;
      };
      const bool has_adapters = std::any_of(store.tensors().begin(), store.tensors().end(),
                                            [&](const TensorState& own) { return is_adapter(own.name); });
      throw CheckpointError(
          fmt::format("{} holds tensor {}, which this model does not have; {}", folder, stored.name,
                      !is_adapter(stored.name) ? "a partial load (--partial) passes it over"
                      : has_adapters           ? "its adapters are others than those of tranche.lora"
                                     : "it holds adapters: give its tranche.lora, or export it merged"));
    }
    match.differences.push_back(
        fmt::format("tensor {} of {}: passed over, the model has none of this name", stored.name, folder));
  }
  if (std::find(taken.begin(), taken.end(), true) == taken.end()) {
    throw CheckpointError(fmt::format(
        "{} holds no tensor of this model: its first is {}, the model's is {}", folder,
        reader.tensors().empty() ? "none" : reader.tensors().front().name, store.tensors().front().name));
  }
  return match;
}

}  // namespace tranche::detail
