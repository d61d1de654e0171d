#include "tools/checkpoint/peft.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "core/json.h"
#include "core/json_node.h"
#include "core/text_file.h"
#include "tools/checkpoint/checkpoint_source.h"
#include "tools/checkpoint/hugging_face.h"
#include "tools/checkpoint/model_files.h"
#include "tools/checkpoint/peft_layers.h"
#include "tranche/core/error.h"
#include "tranche/engine/model_spec.h"

namespace tranche::tools {

using checkpoint::SafeTensor;
using detail::JsonNode;

namespace {

constexpr std::string_view prefix = "base_model.model.", weight = ".weight", a_end = ".lora_A.weight",
                           b_end = ".lora_B.weight", base_layer = ".base_layer";
constexpr const char* base_key = "base_model_name_or_path";

/// Keys that do not change the numbers of adapters that are already trained.
constexpr std::array<std::string_view, 14> without_effect{
    "auto_mapping",   "base_model_name_or_path", "exclude_modules",     "fan_in_fan_out", "inference_mode",
    "layers_pattern", "layers_to_transform",     "megatron_core",       "peft_version",   "qalora_group_size",
    "revision",       "runtime_config",          "ensure_weight_tying", "task_type"};

/// Keys that would change numbers; they are refused unless their value has no effect.
struct Refused {
  std::string_view key, why;
};
constexpr std::array<Refused, 14> refused_keys{{
    {"use_dora", "DoRA (weight-decomposed adapters) is not part of this version"},
    {"use_qalora", "QA-LoRA (adapters of a quantised base) is not part of this version"},
    {"loftq_config", "LoftQ belongs to QLoRA (a quantised base), which is not part of this version"},
    {"rank_pattern", "all adapters have one rank"},
    {"alpha_pattern", "all adapters have one alpha"},
    {"lora_bias", "adapters have no biases"},
    {"modules_to_save", "only adapters are trained beside the base"},
    {"trainable_token_indices", "only adapters are trained beside the base"},
    {"target_parameters", "adapters are for linear layers"},
    {"layer_replication", "the model has the layers of its config.json"},
    {"megatron_config", "the layers are not Megatron's"},
    {"alora_invocation_tokens", "adapters act on every token"},
    {"arrow_config", "there is one adapter a layer"},
    {"eva_config", "only the adapters' values are taken"},
}};

bool asks_for_nothing(const nlohmann::json& value) {
  return value.is_null() || value == false || value == 0 ||
         (value.is_string() && value.get_ref<const std::string&>().empty()) ||
         ((value.is_object() || value.is_array()) && value.empty());
}

/// True if `init_lora_weights` does not change the base.
bool leaves_base(const nlohmann::json& value) {
  return value.is_boolean() || value.is_null() || value == "gaussian" || value == "orthogonal" ||
         value == "eva";
}

std::string last_part(const std::string& name) {
  return name.substr(name.rfind('.') + 1);
}

/// The names of the layers with an adapter, as short as possible while PEFT still reads them as the same
/// layers.
std::vector<std::string> targets_of(const models::LanguageModel& model, const LoraConfig& lora) {
  std::set<std::string> ends, all;
  const ModelSpec plain = model.spec(model.shape().positions), spec = with_adapters(plain, lora);
  for (const UnitSpec& unit : spec.units()) {
    for (const LowRankAdapter& adapter : unit.adapters) {
      all.insert(linear_name(unit.tensors[static_cast<std::size_t>(adapter.weight)]));
    }
  }
  for (const std::string& name : all) ends.insert(last_part(name));
  for (const UnitSpec& unit : plain.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      const std::string name = linear_name(tensor);
      if (!name.empty() && ends.contains(last_part(name)) && !all.contains(name))
        return {all.begin(), all.end()};
    }
  }
  return {ends.begin(), ends.end()};
}

nlohmann::ordered_json companion_json(const checkpoint::Companions& companions, std::string_view name) {
  const checkpoint::Companion* found = checkpoint::find_companion(companions, name);
  return detail::parse_json(found == nullptr ? "{}" : found->bytes);
}

/// The text under a key; empty where there is none.
std::string text_in(const nlohmann::ordered_json& json, const char* key) {
  const auto at = json.is_object() ? json.find(key) : json.end();
  return at != json.end() && at->is_string() ? at->get<std::string>() : std::string();
}

/// True if a name of a base, which is a path or a hub's "organisation/model", is that of a folder.
bool names_folder(const std::string& name, const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (fs::equivalent(name, folder, ignored)) return true;
  const auto parts = [](const fs::path& path) {
    const fs::path normal = (path / "").lexically_normal();
    std::vector<std::string> list(normal.begin(), normal.end());
    if (!list.empty() && list.back().empty()) list.pop_back();
    return list;
  };
  const std::vector<std::string> named = parts(name), there = parts(folder);
  if (fs::path(name).is_absolute() || named.empty() || there.empty()) return named == there;
  return named.back() == there.back() ||
         std::find(there.begin(), there.end(), fmt::format("models--{}", fmt::join(named, "--"))) !=
             there.end();
}

bool has_in_out(const ModelSpec& spec) {
  for (const UnitSpec& unit : spec.units()) {
    for (const LowRankAdapter& adapter : unit.adapters) {
      if (unit.tensors[static_cast<std::size_t>(adapter.weight)].linear == LinearLayout::in_out) return true;
    }
  }
  return false;
}

}  // namespace

bool is_peft(detail::FileSystem& files, const std::string& path) {
  return files.exists(detail::join_path(path, peft_config_name));
}

std::vector<checkpoint::ExportTensor> peft_tensors(checkpoint::Reader& reader) {
  std::vector<checkpoint::ExportTensor> tensors;
  for (const checkpoint::StoredTensor& tensor : reader.tensors()) {
    if (!tensor.name.ends_with(a_end) && !tensor.name.ends_with(b_end)) continue;
    tensors.push_back(
        {std::string(prefix) + tensor.name, tensor.shape,
         [&reader, name = tensor.name](detail::ElementRange elements, DataType dtype, void* memory) {
           reader.read_tensor(name, "weight", elements, dtype, memory);
         }});
  }
  return tensors;
}

std::string peft_config(const models::LanguageModel& model, const LoraConfig& lora,
                        const checkpoint::Companions& companions, std::vector<std::string>& notes) {
  nlohmann::ordered_json base = nullptr;
  if (const std::string folder = text_in(companion_json(companions, origin_name), "folder"); !folder.empty())
    base = folder;
  if (auto imported = companion_json(companions, peft_config_name);
      imported.is_object() && !imported.empty()) {
    imported["lora_dropout"] = lora.dropout;
    imported["inference_mode"] = true;
    nlohmann::ordered_json& named = imported[base_key];
    if (named.is_null()) {
      named = base;
    } else if (!other_base(companions, companions, "").empty()) {
      // A name of a hub may be that of the folder's model all the same.
      const std::string name = text_in(imported, base_key);
      if (std::filesystem::path(name).is_absolute()) named = base;
      notes.push_back(
          fmt::format("the imported adapters named {} as the base, but the base was imported from {}: "
                      "{} names {}",
                      name, base.get<std::string>(), peft_config_name, named.dump()));
    }
    return imported.dump(2) + "\n";
  }
  if (base.is_null()) {
    notes.push_back(
        fmt::format("{} names no base, because the base was not imported: write its path or name as "
                    "base_model_name_or_path",
                    peft_config_name));
  }
  // PEFT's transposed layers are those of Conv1D, which store [in, out].
  const bool in_out = has_in_out(with_adapters(model.spec(model.shape().positions), lora));
  const nlohmann::ordered_json json{{"peft_type", "LORA"},
                                    {"task_type", "CAUSAL_LM"},
                                    {"base_model_name_or_path", base},
                                    {"r", lora.rank},
                                    {"lora_alpha", lora.effective_alpha()},
                                    {"lora_dropout", lora.dropout},
                                    {"use_rslora", lora.rank_scaled},
                                    {"target_modules", targets_of(model, lora)},
                                    {"fan_in_fan_out", in_out},
                                    {"bias", "none"},
                                    {"init_lora_weights", true},
                                    {"use_dora", false},
                                    {"modules_to_save", nullptr},
                                    {"rank_pattern", nlohmann::json::object()},
                                    {"alpha_pattern", nlohmann::json::object()},
                                    {"inference_mode", true}};
  return json.dump(2) + "\n";
}

std::string other_base(const checkpoint::Companions& own, const checkpoint::Companions& base,
                       const std::string& folder) {
  const std::string name = text_in(companion_json(own, peft_config_name), base_key),
                    origin = text_in(companion_json(base, origin_name), "folder");
  if (name.empty() || origin.empty() || names_folder(name, origin)) return {};
  return fmt::format("{} of {} names {} as the base, but --base was imported from {}", peft_config_name,
                     folder, name, origin);
}

LoraConfig lora_from_peft(std::string_view text, std::string_view file) {
  const JsonNode root = JsonNode::read<ConfigurationError>(text, file);
  const auto json = nlohmann::json::parse(text);
  if (const std::string method = root["peft_type"].text(); method != "LORA")
    root["peft_type"].fail(fmt::format("is \"{}\"; only LORA is read", method));
  for (const auto& [key, why] : refused_keys) {
    const auto at = json.find(key);
    if (at != json.end() && !asks_for_nothing(*at)) root[key].fail(fmt::format("is {}: {}", at->dump(), why));
  }
  if (const JsonNode bias = root["bias"]; bias && json["bias"] != "none")
    bias.fail(fmt::format("is {}: only adapters are trained beside the base", json["bias"].dump()));
  if (const JsonNode init = root["init_lora_weights"]; init && !leaves_base(json["init_lora_weights"])) {
    init.fail(
        fmt::format("is {}: it changes the base's weights, so they are not those of this run's base; convert "
                    "the adapters with PEFT's path_initial_model_for_weight_conversion",
                    json["init_lora_weights"].dump()));
  }
  constexpr std::array<std::string_view, 8> read{
      "peft_type",      "r",    "lora_alpha",       "lora_dropout", "use_rslora",
      "target_modules", "bias", "init_lora_weights"};
  for (const auto& [key, value] : json.items()) {
    const auto is_in = [&](const auto& list) {
      return std::find(list.begin(), list.end(), key) != list.end();
    };
    const bool known = is_in(read) || is_in(without_effect) ||
                       std::any_of(refused_keys.begin(), refused_keys.end(),
                                   [&](const Refused& refused) { return refused.key == key; });
    if (!known && !asks_for_nothing(value))
      root[key].fail(fmt::format("is {}: the key is not known, and may change numbers", value.dump()));
  }
  LoraConfig lora;
  lora.rank = root["r"].integer(1);
  const auto number = [&](const char* key, double otherwise) {
    const auto at = json.find(key);
    if (at == json.end() || at->is_null()) return otherwise;
    if (!at->is_number()) root[key].fail("is no number");
    return at->get<double>();
  };
  lora.alpha = number("lora_alpha", 8);
  lora.dropout = number("lora_dropout", 0);
  // A null key counts as not set.
  if (const JsonNode scaled = root["use_rslora"]) lora.rank_scaled = scaled.boolean();
  if (const JsonNode transposed = root["fan_in_fan_out"]) (void)transposed.boolean();
  const NamedLayers named(root);
  lora.targets = named.targets();
  std::sort(lora.targets.begin(), lora.targets.end());
  LoraConfig checked = lora;
  checked.targets = {"all-linear"};
  if (const std::string problem = checked.problem(); !problem.empty())
    throw ConfigurationError(fmt::format("{}: {}", file, problem));
  return lora;
}

PeftAdapters::PeftAdapters(detail::FileSystem& files, const std::string& path,
                           const models::LanguageModel& model, checkpoint::Reader& base)
    : path_(path), folder_(files, detail::join_path(path, std::string(peft_stem) + ".safetensors")) {
  const std::string config = detail::join_path(path, peft_config_name);
  const std::string text = detail::read_text_file(config, "an adapter's configuration");
  lora_ = lora_from_peft(text, config);
  std::vector<NamedShape> found;
  std::set<std::string> layers;
  for (const SafeTensor& tensor : folder_.tensors()) {
    const std::string origin = fmt::format("{}: tensor {}", path_, tensor.name);
    if (!tensor.name.starts_with(prefix))
      throw CheckpointError(
          fmt::format("{} is not a PEFT tensor: its name does not begin with {}", origin, prefix));
    std::string name = model.tensor_of(tensor.name.substr(prefix.size()));
    if (name.ends_with(a_end) || name.ends_with(b_end)) {
      if (tensor.dtype != "F32" && tensor.dtype != "BF16" && tensor.dtype != "F16")
        throw CheckpointError(fmt::format("{} is {}; F32, BF16 and F16 are read", origin, tensor.dtype));
      layers.insert(name.substr(0, name.size() - a_end.size()));
      found.push_back({name, shape_of(tensor, path_)});
      tensors_.emplace(std::move(name), &tensor);
      continue;
    }
    // PEFT saves an embedding or head that has its own adapters under this name.
    if (const std::size_t at = name.find(base_layer); at != std::string::npos)
      name.erase(at, base_layer.size());
    if (base.find(name) == nullptr) {
      throw CheckpointError(
          fmt::format("{} is no adapter of a linear layer, and no weight of the base", origin));
    }
    require_equal(tensor, name, base);
  }
  const ModelSpec plain = model.spec(model.shape().positions);
  const auto adapted = [&](const std::vector<std::string>& targets) {
    std::set<std::string> names;
    LoraConfig lora = lora_;
    lora.targets = targets;
    const ModelSpec with = with_adapters(plain, lora);
    for (const UnitSpec& unit : with.units()) {
      for (const LowRankAdapter& adapter : unit.adapters)
        names.insert(linear_name(unit.tensors[static_cast<std::size_t>(adapter.weight)]));
    }
    return names;
  };
  require_named(JsonNode::read<ConfigurationError>(text, config), layers, plain);
  // PEFT's patterns may be regular expressions, and other keys may exclude layers; our targets are names.
  bool same = false;
  try {
    same = !lora_.targets.empty() && adapted(lora_.targets) == layers;
  } catch (const ConfigurationError&) {
  }
  if (!same) lora_.targets.assign(layers.begin(), layers.end());
  if (lora_.targets.empty()) throw CheckpointError(path_ + " holds no adapters");
  ModelSpec spec;
  try {
    const ModelSpec whole = with_adapters(plain, lora_);
    for (UnitSpec unit : whole.units()) {
      std::erase_if(unit.tensors, [](const TensorSpec& tensor) { return tensor.frozen; });
      if (!unit.tensors.empty()) spec.add_unit(std::move(unit));
    }
  } catch (const ConfigurationError& problem) {
    throw CheckpointError(fmt::format("{}: {}", path_, problem.message()));
  }
  const TensorDifferences differences = compare_tensors(spec, found);
  if (!differences.any()) return;
  throw CheckpointError(
      fmt::format("{} does not hold the adapters of its {} on {}{}; give --base the model that they were "
                  "trained beside",
                  path_, peft_config_name, base.folder(), differences.to_string()));
}

void PeftAdapters::require_named(const JsonNode& config, const std::set<std::string>& layers,
                                 const ModelSpec& model) {
  const NamedLayers named(config);
  if (!named.any()) return;
  std::vector<std::string> missing, extra;
  std::set<std::string> seen;
  const auto look_at = [&](const std::string& module, bool all) {
    if (module.empty() || !seen.insert(module).second) return;
    const bool wanted = named.has(module, all), there = layers.contains(module);
    if (wanted && !there) missing.push_back(module);
    if (there && !wanted) extra.push_back(module);
  };
  try {
    for (const UnitSpec& unit : model.units()) {
      for (const TensorSpec& tensor : unit.tensors) {
        const bool head = linear_name(tensor) == "lm_head";
        look_at(linear_name(tensor), !head);
        // An embedding is not a linear layer, but a module that can be named.
        if (tensor.shape.rank() == 2 && tensor.name.ends_with(weight))
          look_at(tensor.name.substr(0, tensor.name.size() - weight.size()), false);
      }
    }
  } catch (const InvalidArgument& problem) {
    notes_.push_back(
        fmt::format("the layers that {} of {} names were not compared with the adapters that are there: {}",
                    peft_config_name, path_, problem.message()));
    return;
  }
  if (!missing.empty()) {
    throw CheckpointError(fmt::format("{} lacks adapters of layers that its {} names: {}", path_,
                                      peft_config_name, some_of(missing)));
  }
  if (!extra.empty()) {
    throw CheckpointError(fmt::format("{} holds adapters of layers that its {} does not name: {}", path_,
                                      peft_config_name, some_of(extra)));
  }
}

void PeftAdapters::require_equal(const SafeTensor& copy, const std::string& name,
                                 checkpoint::Reader& base) const {
  constexpr std::int64_t stride = std::int64_t{1} << 18;
  const checkpoint::StoredTensor& tensor = *base.find(name);
  std::vector<float> a(static_cast<std::size_t>(stride)), b(a.size());
  bool same = copy.elements == tensor.shape.elements();
  for (std::int64_t at = 0; same && at < copy.elements; at += stride) {
    const detail::ElementRange range{at, std::min(at + stride, copy.elements)};
    folder_.read(copy, range, DataType::float32, a.data());
    base.read_tensor(tensor.name, "weight", range, DataType::float32, b.data());
    same = std::memcmp(a.data(), b.data(), static_cast<std::size_t>(range.size()) * sizeof(float)) == 0;
  }
  if (same) return;
  throw CheckpointError(
      fmt::format("{}: {} is not equal to {} of the base {}: it was trained, and only adapters are taken",
                  path_, copy.name, name, base.folder()));
}

void PeftAdapters::read(const std::string& tensor, detail::ElementRange elements, void* fp32) const {
  folder_.read(*tensors_.at(tensor), elements, DataType::float32, fp32);
}

}  // namespace tranche::tools
