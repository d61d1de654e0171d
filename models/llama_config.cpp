#include "tranche/models/llama_config.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/json.h"
#include "core/json_node.h"
#include "models/config_json.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/models/language_model.h"

namespace tranche::models {

using detail::JsonNode;
using kernels::RopeScaling;
using nlohmann::json;

namespace {

struct KindNames {
  LlamaKind kind;
  const char* architecture;
  const char* model_type;
};
constexpr KindNames kinds[] = {{LlamaKind::llama, "LlamaForCausalLM", "llama"},
                               {LlamaKind::mistral, "MistralForCausalLM", "mistral"},
                               {LlamaKind::qwen2, "Qwen2ForCausalLM", "qwen2"},
                               {LlamaKind::qwen3, "Qwen3ForCausalLM", "qwen3"}};
constexpr const char *full_layer = "full_attention", *window_layer = "sliding_attention";

const KindNames& names_of(LlamaKind kind) {
  return kinds[static_cast<std::size_t>(kind)];
}

bool is_qwen(LlamaKind kind) {
  return kind == LlamaKind::qwen2 || kind == LlamaKind::qwen3;
}

LlamaKind read_kind(const JsonNode& root) {
  const JsonNode type = root["model_type"], architectures = root["architectures"];
  if (!type) type.fail("is missing; in that of a LlamaForCausalLM it is \"llama\"");
  for (const KindNames& names : kinds) {
    if (type.json() != names.model_type) continue;
    if (architectures && architectures.texts() != std::vector<std::string>{names.architecture}) {
      architectures.fail(fmt::format("is {}; of a \"{}\" only [\"{}\"] can be trained here",
                                     architectures.json().dump(), names.model_type, names.architecture));
    }
    return names.kind;
  }
  type.fail(fmt::format("is {}: another architecture; of the Llama family {} can be trained here",
                        detail::brief_json(type.json()), fmt::join(LlamaConfig::model_types(), ", ")));
}

/// The defaults of transformers' configuration classes for keys that config.json lacks.
LlamaConfig defaults_of(LlamaKind kind) {
  LlamaConfig config;
  config.kind = kind;
  if (kind == LlamaKind::mistral) {
    config.key_value_heads = 8;
    config.inner = 14336;
    config.positions = 131072;
    config.window = 4096;
  } else if (is_qwen(kind)) {
    config.vocabulary = 151936;
    config.inner = 22016;
    config.positions = 32768;
  }
  return config;
}

/// Throws for settings of other models in transformers, with which the numbers would differ.
void require_no_others(const JsonNode& root) {
  const std::pair<const char*, const char*> switches[] = {
      {"add_cross_attention", "there is no encoder to attend to"},
      {"is_encoder_decoder", "there is no encoder"},
      {"use_bidirectional_attention", "attention is causal"},
      {"alibi", "positions are rotary"},
      {"rope_interleaved", "rotary pairs are (i, i + head_dim / 2)"},
      {"use_qk_norm", "only a Qwen3ForCausalLM has norms of query and key, and has them always"},
      {"parallel_residual", "attention and MLP follow one another"}};
  for (const auto& [key, because] : switches) require_value(root[key], false, because);
  for (const char* key : {"partial_rotary_factor", "logits_scaling", "logit_scale", "attention_multiplier",
                          "embedding_multiplier", "residual_multiplier"}) {
    const JsonNode node = root[key];
    if (node && node.number() != 1) {
      require_value(node, 1, "all of a head is rotated, and nothing is scaled beyond the architecture");
    }
  }
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
                          "no_rope_layers", "attention_chunk_size", "num_local_experts", "num_experts"}) {
    if (root[key]) {
      root[key].fail(
          fmt::format("is {}: no architecture of the Llama family has it; remove the key where the weights "
                      "were trained without it",
                      detail::brief_json(root[key].json())));
    }
  }
  refuse_quantized(root);
}

RopeScaling read_scaling(const JsonNode& block) {
  const JsonNode type = block["rope_type"] ? block["rope_type"] : block["type"];
  const std::string kind = type.text();
  if (kind != "default" && kind != "linear" && kind != "llama3") {
    type.fail(fmt::format(
        "is \"{}\": only the rotary position types default, linear and llama3 can be trained here", kind));
  }
  block.allow({"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor",
               "high_freq_factor", "original_max_position_embeddings"});
  const JsonNode part = block["partial_rotary_factor"];
  if (part && part.number() != 1) require_value(part, 1, "all of a head is rotated");
  constexpr double least = 1e-6, most = 1e9;
  RopeScaling scaling;
  if (kind == "default") return scaling;
  scaling.factor = block["factor"].number(least, most);
  scaling.kind = RopeScaling::Kind::linear;
  if (kind == "linear") return scaling;
  scaling.kind = RopeScaling::Kind::llama3;
  scaling.low_frequency_factor = block["low_freq_factor"].number(least, most);
  scaling.high_frequency_factor = block["high_freq_factor"].number(least, most);
  scaling.original_positions = block["original_max_position_embeddings"].integer(1, most_rows);
  return scaling;
}

/// transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters with both.
void read_rope(const JsonNode& root, LlamaConfig& config) {
  const JsonNode scaling = root["rope_scaling"], parameters = root["rope_parameters"];
  if (scaling && parameters) {
    parameters.fail(
        "and rope_scaling are both given; keep one, as transformers 5 or as transformers 4 has it");
  }
  const JsonNode block = scaling ? scaling : parameters;
  const JsonNode outer = root["rope_theta"];
  config.rope_theta = outer.number_or(config.rope_theta);
  if (!block) return;
  for (const auto& [key, value] : block.members()) {
    if (value && value.json().is_object()) {
      value.fail("is a block: rotary positions that differ by layer cannot be trained here");
    }
  }
  config.rope = read_scaling(block);
  const double theta = block["rope_theta"].number_or(config.rope_theta);
  if (outer && theta != config.rope_theta) {
    block["rope_theta"].fail(fmt::format("is {}, but rope_theta {}; keep one", theta, config.rope_theta));
  }
  config.rope_theta = theta;
}

/// One entry a layer; true: it has the window.
std::vector<bool> read_layer_types(const JsonNode& node, std::int64_t layers) {
  std::vector<bool> windowed;
  for (const JsonNode& entry : node.items()) {
    const std::string type = entry.text();
    if (type != full_layer && type != window_layer) {
      entry.fail(fmt::format("is \"{}\"; {} and {} can be trained here", type, full_layer, window_layer));
    }
    windowed.push_back(type == window_layer);
  }
  if (static_cast<std::int64_t>(windowed.size()) != layers) {
    node.fail(fmt::format("has {} entries, but num_hidden_layers is {}", windowed.size(), layers));
  }
  return windowed;
}

void read_windows(const JsonNode& root, LlamaConfig& config) {
  const JsonNode window = root["sliding_window"], types = root["layer_types"];
  if (config.kind == LlamaKind::llama) {
    if (window) {
      window.fail(fmt::format("is {}: a LlamaForCausalLM has no window; a MistralForCausalLM has",
                              detail::brief_json(window.json())));
    }
  } else if (config.kind == LlamaKind::mistral) {
    // Null means that there is no window; a missing key means the default.
    if (window) config.window = window.integer(1, most_rows);
    for (const auto& [key, value] : root.members()) {
      if (key == "sliding_window" && !value) config.window = 0;
    }
  } else {
    constexpr std::int64_t first_layer = 28, default_window = 4096;
    const JsonNode used = root["use_sliding_window"];
    const bool wanted = used && used.boolean();
    const bool none = wanted && root.json().contains("sliding_window") && !window;
    const std::int64_t first = root["max_window_layers"].integer_or(first_layer, 0);
    if (wanted && !none) {
      config.window = window.integer_or(default_window, 1, most_rows);
      for (std::int64_t i = 0; i < config.layers; ++i) config.windowed.push_back(i >= first);
    }
  }
  if (types) {
    const std::vector<bool> given = read_layer_types(types, config.layers);
    const bool some = std::find(given.begin(), given.end(), true) != given.end();
    if (some && config.window == 0) {
      types.fail(is_qwen(config.kind) ? "has sliding_attention, but use_sliding_window or sliding_window say "
                                        "that there is no window"
                                      : "has sliding_attention, but there is no window");
    }
    const bool all = std::find(given.begin(), given.end(), false) == given.end();
    if (config.kind == LlamaKind::mistral && config.window > 0 && !all) {
      types.fail(
          "has full_attention, but a MistralForCausalLM gives its window to every layer; remove the "
          "key, or set sliding_window to null");
    }
    config.windowed = given;
  }
  // Equal windows are always described in the same way.
  const auto& by_layer = config.windowed;
  if (config.window > 0 && !by_layer.empty() &&
      std::find(by_layer.begin(), by_layer.end(), true) == by_layer.end()) {
    config.window = 0;
  }
  if (config.window == 0 || std::find(by_layer.begin(), by_layer.end(), false) == by_layer.end()) {
    config.windowed.clear();
  }
}

void read_biases(const JsonNode& root, LlamaConfig& config) {
  const JsonNode attention = root["attention_bias"], mlp = root["mlp_bias"];
  if (config.kind == LlamaKind::mistral) {
    require_value(attention, false, "a MistralForCausalLM has no biases");
  } else if (config.kind != LlamaKind::qwen2) {
    // Qwen2's biases are fixed; transformers ignores the key there.
    config.attention_bias = attention && attention.boolean();
  }
  if (config.kind == LlamaKind::llama) {
    config.mlp_bias = mlp && mlp.boolean();
  } else {
    require_value(mlp, false, "only a LlamaForCausalLM has biases in its MLP");
  }
}

}  // namespace

std::string_view LlamaConfig::architecture() const {
  return names_of(kind).architecture;
}

std::string_view LlamaConfig::model_type() const {
  return names_of(kind).model_type;
}

std::vector<std::string> LlamaConfig::architectures() {
  std::vector<std::string> names;
  for (const auto& each : kinds) names.emplace_back(each.architecture);
  return names;
}

std::vector<std::string> LlamaConfig::model_types() {
  std::vector<std::string> names;
  for (const auto& each : kinds) names.emplace_back(each.model_type);
  return names;
}

LlamaConfig LlamaConfig::from_json(std::string_view text, std::string_view file) {
  const JsonNode root = JsonNode::read<ConfigurationError>(text, file);
  LlamaConfig config = defaults_of(read_kind(root));
  require_value(root["hidden_act"], "silu", "another activation");
  require_value(root["pretraining_tp"], 1, "transformers no longer computes sums in slices");
  require_no_others(root);

  config.layers = root["num_hidden_layers"].integer_or(config.layers, 1, most_layers);
  config.width = root["hidden_size"].integer_or(config.width, 1, most_width);
  config.heads = root["num_attention_heads"].integer_or(config.heads, 1, most_width);
  // If the key is missing, Llama has as many as heads; null means the same in every class.
  const JsonNode grouped = root["num_key_value_heads"];
  const bool as_heads = config.kind == LlamaKind::llama || root.json().contains("num_key_value_heads");
  config.key_value_heads = grouped.integer_or(as_heads ? config.heads : config.key_value_heads);
  const JsonNode head_dim = root["head_dim"];
  if (head_dim) {
    config.head_dim = head_dim.integer(1, most_width);
  } else if (config.kind != LlamaKind::qwen3) {
    if (config.width % config.heads != 0) {
      root["num_attention_heads"].fail(
          fmt::format("is {}, which does not divide hidden_size {}, and there is no head_dim", config.heads,
                      config.width));
    }
    config.head_dim = config.width / config.heads;
  }
  config.inner = root["intermediate_size"].integer_or(config.inner);
  config.vocabulary = root["vocab_size"].integer_or(config.vocabulary);
  config.positions = root["max_position_embeddings"].integer_or(config.positions);
  const JsonNode tied = root["tie_word_embeddings"];
  config.tied = tied && tied.boolean();
  config.norm_epsilon = float_or(config.norm_epsilon, root["rms_norm_eps"]);
  config.attention_dropout = float_or(config.attention_dropout, root["attention_dropout"]);
  config.initializer_range = float_or(config.initializer_range, root["initializer_range"]);
  read_biases(root, config);
  read_rope(root, config);
  read_windows(root, config);
  config.token_ids = read_token_ids(root);
  config.validate(file);
  return config;
}

std::string LlamaConfig::to_json() const {
  nlohmann::ordered_json object = {{"architectures", {architecture()}},
                                   {"model_type", model_type()},
                                   {"hidden_act", "silu"},
                                   {"num_hidden_layers", layers},
                                   {"hidden_size", width},
                                   {"intermediate_size", inner},
                                   {"num_attention_heads", heads},
                                   {"num_key_value_heads", key_value_heads},
                                   {"vocab_size", vocabulary},
                                   {"max_position_embeddings", positions},
                                   {"rms_norm_eps", shortest_number(norm_epsilon)},
                                   {"attention_dropout", shortest_number(attention_dropout)},
                                   {"initializer_range", shortest_number(initializer_range)},
                                   {"tie_word_embeddings", tied},
                                   {"rope_theta", rope_theta}};
  // transformers 5 reads the keys of 4; 4 does not read those of 5.
  if (rope.kind == RopeScaling::Kind::none) {
    object["rope_scaling"] = nullptr;
  } else if (rope.kind == RopeScaling::Kind::linear) {
    object["rope_scaling"] = {{"rope_type", "linear"}, {"factor", rope.factor}};
  } else {
    object["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", rope.factor},
                              {"low_freq_factor", rope.low_frequency_factor},
                              {"high_freq_factor", rope.high_frequency_factor},
                              {"original_max_position_embeddings", rope.original_positions}};
  }
  // Qwen2Config has no such field, but transformers accepts it.
  if (kind != LlamaKind::qwen2 || query_width() != width) object["head_dim"] = head_dim;
  const json window_or_null = window > 0 ? json(window) : json(nullptr);
  if (kind == LlamaKind::llama || kind == LlamaKind::qwen3) object["attention_bias"] = attention_bias;
  if (kind == LlamaKind::llama) object["mlp_bias"] = mlp_bias;
  if (kind == LlamaKind::mistral) object["sliding_window"] = window_or_null;
  if (is_qwen(kind)) {
    std::vector<const char*> types;
    for (std::int64_t i = 0; i < layers; ++i) types.push_back(window_of(i) > 0 ? window_layer : full_layer);
    const auto first = std::find(types.begin(), types.end(), window_layer);
    object["use_sliding_window"] = window > 0;
    object["sliding_window"] = window_or_null;
    // Older versions of transformers read this instead of layer_types.
    object["max_window_layers"] = first - types.begin();
    object["layer_types"] = types;
  }
  for (const auto& [key, value] : token_ids) object[key] = json::parse(value);
  return object.dump(2) + "\n";
}

void LlamaConfig::validate(std::string_view origin) const {
  const auto refuse = [&](const std::string& what) {
    throw ConfigurationError(fmt::format("{}: {}", origin, what));
  };
  struct Size {
    const char* key;
    std::int64_t value, most;
  };
  // These limits exceed any trained model, and are small enough that no product of them overflows.
  const Size sizes[] = {{"num_hidden_layers", layers, most_layers},
                        {"num_attention_heads", heads, most_width},
                        {"num_key_value_heads", key_value_heads, most_width},
                        {"head_dim", head_dim, most_width},
                        {"hidden_size", width, most_width},
                        {"intermediate_size", inner, 4 * most_width},
                        {"vocab_size", vocabulary, most_rows},
                        {"max_position_embeddings", positions, most_rows}};
  for (const auto& [key, value, most] : sizes) {
    if (value < 1) refuse(fmt::format("\"{}\" is {}, but must be positive", key, value));
    if (value > most) {
      refuse(fmt::format("\"{}\" is {}, but models of at most {} are read", key, value, most));
    }
  }
  if (query_width() > 4 * most_width) {
    refuse(
        fmt::format("\"num_attention_heads\" {} times \"head_dim\" {} is {}, but models of at most {} are "
                    "read",
                    heads, head_dim, query_width(), 4 * most_width));
  }
  if (heads % key_value_heads != 0) {
    refuse(
        fmt::format("\"num_key_value_heads\" {} does not divide \"num_attention_heads\" {}; every group of "
                    "heads needs the same size",
                    key_value_heads, heads));
  }
  if (head_dim % 2 != 0) {
    refuse(fmt::format("\"head_dim\" is {}, but must be even: rotary positions turn pairs", head_dim));
  }
  if (window < 0 || window > most_rows) {
    refuse(fmt::format("\"sliding_window\" is {}, but 1 to {} is wanted, or none", window, most_rows));
  }
  if (!windowed.empty() && static_cast<std::int64_t>(windowed.size()) != layers) {
    refuse(fmt::format("\"layer_types\" has {} entries for {} layers", windowed.size(), layers));
  }
  if (!(rope_theta > 0 && rope_theta <= 1e30)) {
    refuse(fmt::format("\"rope_theta\" is {}, but must be positive and at most 1e30", rope_theta));
  }
  if (rope.kind == RopeScaling::Kind::llama3 && !(rope.low_frequency_factor < rope.high_frequency_factor)) {
    refuse(fmt::format("\"high_freq_factor\" is {}, but must be above \"low_freq_factor\" {}",
                       rope.high_frequency_factor, rope.low_frequency_factor));
  }
  if (!(attention_dropout >= 0 && attention_dropout < 1)) {
    refuse(
        fmt::format("\"attention_dropout\" is {}, but a probability in [0, 1) is wanted", attention_dropout));
  }
  if (!(norm_epsilon > 0)) {
    refuse(fmt::format("\"rms_norm_eps\" is {}, but must be positive", norm_epsilon));
  }
  if (!(initializer_range >= 0)) {
    refuse(fmt::format("\"initializer_range\" is {}, but must not be negative", initializer_range));
  }
  if (parameters() > most_parameters) {
    refuse(fmt::format("the model has {} parameters, but models of at most {} are read", parameters(),
                       most_parameters));
  }
}

std::int64_t LlamaConfig::parameters() const {
  const std::int64_t q = query_width(), kv = key_value_width();
  std::int64_t block =
      checked_add(checked_multiply(width, 2 * q + 2 * kv), checked_multiply(3 * width, inner));
  block += 2 * width;
  if (query_key_value_bias()) block += q + 2 * kv;
  if (output_bias()) block += width;
  if (mlp_bias) block += 2 * inner + width;
  if (query_key_norm()) block += 2 * head_dim;
  const std::int64_t table = checked_multiply(vocabulary, width);
  return checked_add(checked_multiply(layers, block), checked_add(tied ? table : 2 * table, width));
}

double LlamaConfig::flops_per_token(std::int64_t sequence) const {
  const auto w = static_cast<double>(width), q = static_cast<double>(query_width()),
             kv = static_cast<double>(key_value_width()), s = static_cast<double>(sequence);
  const double block = w * (2 * q + 2 * kv) + 3 * w * static_cast<double>(inner);
  double keys = 0;
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::int64_t most = window_of(i);
    const double seen = most > 0 ? static_cast<double>(std::min(most, sequence)) : s;
    keys += (seen * (seen + 1) / 2 + (s - seen) * seen) / s;
  }
  return 6 * (static_cast<double>(layers) * block + static_cast<double>(vocabulary) * w) + 12 * q * keys;
}

}  // namespace tranche::models
