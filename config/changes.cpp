#include "config/changes.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "config/keys.h"
#include "core/json.h"
#include "tranche/core/error.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

using nlohmann::json;

namespace {

/// True for a key whose value, or whose object's value, does not change any result.
bool is_quiet(std::string key) {
  for (;;) {
    const ConfigKey* row = find_configuration_key(key);
    if (row != nullptr && row->same_results) return true;
    const std::size_t dot = key.rfind('.');
    if (dot == std::string::npos) return false;
    key.resize(dot);
  }
}

/// The values that are not objects, by path.
using Flat = std::map<std::string, json>;

void flatten(const json& value, const std::string& key, Flat& into) {
  if (!value.is_object()) {
    into.emplace(key, value);
    return;
  }
  for (const auto& [name, child] : value.items()) flatten(child, key.empty() ? name : key + "." + name, into);
}

Flat flatten(std::string_view text) {
  Flat flat;
  const json document = parse_json(text);
  if (document.is_object()) flatten(document, "", flat);
  return flat;
}

const json* find(const Flat& flat, const std::string& key) {
  const auto found = flat.find(key);
  return found == flat.end() ? nullptr : &found->second;
}

std::string shown(const json* value) {
  if (value == nullptr) return "not set";
  return value->is_string() ? "'" + value->get<std::string>() + "'" : value->dump();
}

/// True when the learning rate decreases toward the end of the run, and the schedule itself does not fix that
/// end.
bool follows_the_end(const Flat& flat) {
  const json* type = find(flat, "scheduler.type");
  if (type == nullptr || !type->is_string()) return false;
  const bool ends = *type == "WarmupDecayLR" || *type == "WarmupCosineLR" ||
                    (*type == "WSD" && find(flat, "scheduler.params.num_stable_steps") == nullptr);
  return ends && find(flat, "scheduler.params.total_num_steps") == nullptr;
}

/// The mesh of an effective configuration (Config::to_json()), for the number of ranks among which its batch
/// is divided; nullopt if the text allows no such mesh. Without the key, as in versions without meshes, all
/// ranks shard.
std::optional<Mesh> saved_mesh(std::string_view config_json) {
  const auto config = parse_json(config_json);
  if (!config.is_object()) return std::nullopt;
  const auto number = [&](const char* key) {
    const auto found = config.find(key);
    return found != config.end() && found->is_number_integer() ? found->get<std::int64_t>() : 0;
  };
  const std::int64_t of_rank =
      number("train_micro_batch_size_per_gpu") * number("gradient_accumulation_steps");
  std::int64_t ranks = of_rank > 0 ? number("train_batch_size") / of_rank : 0;
  std::string text;
  if (const auto block = config.find("tranche"); block != config.end() && block->is_object()) {
    const auto found = block->find("mesh");
    if (found != block->end() && found->is_string()) text = found->get<std::string>();
  }
  // The batch counts data ranks; these axes have several ranks for each data rank.
  for (const MeshAxis beside : {MeshAxis::pipeline, MeshAxis::context, MeshAxis::tensor}) {
    const std::string axis(name_of(beside));
    const auto named = text.find(axis);
    if (named == std::string::npos) continue;
    const auto digits = text.find_first_not_of(" \t=", named + axis.size());
    std::int64_t size = 0;
    if (digits != std::string::npos) {
      std::from_chars(text.data() + digits, text.data() + text.size(), size);
    }
    if (size < 1 || size > INT32_MAX || ranks > INT32_MAX / size) return std::nullopt;
    ranks *= size;
  }
  if (ranks < 1 || ranks > INT32_MAX) return std::nullopt;
  try {
    return Mesh::parse(text, static_cast<int>(ranks));
  } catch (const ConfigurationError&) {
    return std::nullopt;
  }
}

/// True if two configurations mean the same mesh, even if spelled differently: '' and 'shard=*', for example.
bool of_one_mesh(std::string_view saved, std::string_view present) {
  const auto was = saved_mesh(saved), is = saved_mesh(present);
  if (!was || !is) return false;
  const auto replicas = [](const Mesh& mesh) { return mesh.size(MeshAxis::replicate); };
  const auto parts = [](const Mesh& mesh) {
    return std::array{mesh.size(MeshAxis::pipeline), mesh.size(MeshAxis::context),
                      mesh.size(MeshAxis::tensor)};
  };
  return *was == *is || (replicas(*was) == 1 && replicas(*is) == 1 && parts(*was) == parts(*is));
}

bool has_pipeline(std::string_view config_json) {
  const auto mesh = saved_mesh(config_json);
  return mesh && mesh->size(MeshAxis::pipeline) > 1;
}

/// The policy that `auto` selects at this stage.
std::string reduction_policy(const Flat& flat) {
  const json* policy = find(flat, "tranche.reduction");
  const json* stage = find(flat, "zero_optimization.stage");
  if (policy == nullptr || !policy->is_string() || stage == nullptr || !stage->is_number_integer()) return {};
  if (*policy != "auto") return policy->get<std::string>();
  return stage->get<int>() >= 2 ? "micro_batch" : "boundary";
}

std::vector<ChangedValue> changed_values(const Flat& before, const Flat& now) {
  std::vector<ChangedValue> changes;
  const auto compare = [&](const std::string& key) {
    const json *is = find(now, key), *was = find(before, key);
    if (is == nullptr || was == nullptr || *is != *was) changes.push_back({key, shown(is), shown(was)});
  };
  for (const auto& [key, value] : now) compare(key);
  for (const auto& [key, value] : before) {
    if (find(now, key) == nullptr) compare(key);
  }
  return changes;
}

}  // namespace

std::vector<ChangedValue> changed_values(std::string_view saved, std::string_view present) {
  return changed_values(flatten(saved), flatten(present));
}

std::vector<std::string> configuration_changes(std::string_view saved, std::string_view present) {
  const Flat before = flatten(saved), now = flatten(present);
  std::vector<std::string> lines;
  for (const ChangedValue& change : changed_values(before, now)) {
    if (is_quiet(change.key)) continue;
    // Versions without this key behaved so.
    if (change.key == "tranche.replica_sum" && change.is == "'micro_batch'" && change.was == "not set")
      continue;
    // A pipeline sets it, also for models without tied tensors.
    if (change.key == "tranche.tie_sum" && change.is == "'by_use'" && has_pipeline(present)) continue;
    if (change.key == "tranche.mesh" && of_one_mesh(saved, present)) continue;
    if (change.key == "tranche.total_steps" && !follows_the_end(now) && !follows_the_end(before)) continue;
    lines.push_back(change.line());
  }
  const std::string is = reduction_policy(now), was = reduction_policy(before);
  const json *set = find(now, "tranche.reduction"), *earlier = find(before, "tranche.reduction");
  if (is != was && !is.empty() && !was.empty() && set != nullptr && earlier != nullptr && *set == *earlier) {
    lines.push_back(fmt::format(
        "the reduction policy is {}, was {}, as the stage has it: sums round differently from here on; "
        "tranche.reduction={} keeps it",
        is, was, was));
  }
  return lines;
}

}  // namespace tranche::detail
