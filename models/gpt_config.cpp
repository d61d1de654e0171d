#include "tranche/models/gpt_config.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "core/closest_match.h"
#include "core/json_node.h"
#include "models/config_json.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/models/language_model.h"

namespace tranche::models {

using detail::JsonNode;
using json = nlohmann::json;

namespace {

/// The defaults of transformers are GPT-2's end-of-text token, which smaller vocabularies lack.
std::map<std::string, std::string> default_token_ids(std::int64_t vocabulary) {
  const char* const end_of_text = vocabulary > 50256 ? "50256" : "null";
  return {{"bos_token_id", end_of_text}, {"eos_token_id", end_of_text}};
}

struct Preset {
  const char* name;
  GptConfig config;
};

GptConfig gpt2_like(std::int64_t layers, std::int64_t heads, std::int64_t width) {
  GptConfig config;
  config.layers = layers;
  config.heads = heads;
  config.width = width;
  return config;
}

/// Byte models are so small that dropout would only slow down their learning.
GptConfig byte_model(std::int64_t layers, std::int64_t heads, std::int64_t width, std::int64_t positions) {
  GptConfig config = gpt2_like(layers, heads, width);
  config.vocabulary = 256;
  config.positions = positions;
  config.embedding_dropout = config.attention_dropout = config.residual_dropout = 0;
  return config;
}

std::vector<Preset> presets() {
  return {{"gpt2", gpt2_like(12, 12, 768)},         {"gpt2-medium", gpt2_like(24, 16, 1024)},
          {"gpt2-large", gpt2_like(36, 20, 1280)},  {"gpt2-xl", gpt2_like(48, 25, 1600)},
          {"gpt-mini", byte_model(6, 6, 192, 256)}, {"gpt-nano", byte_model(2, 2, 32, 64)}};
}

/// A size under GPT-2's name of its key, or under the name that transformers takes for it too.
std::int64_t size_of_either(const JsonNode& root, const char* key, const char* other,
                            std::int64_t otherwise) {
  const JsonNode first = root[key], second = root[other];
  const std::int64_t size = first.integer_or(second.integer_or(otherwise));
  if (first && second && second.integer() != size)
    second.fail(fmt::format("is {}, but {}, another name of it, {}; keep one", second.integer(), key, size));
  return size;
}

}  // namespace

std::vector<std::string> GptConfig::preset_names() {
  std::vector<std::string> names;
  for (const auto& preset : presets()) names.emplace_back(preset.name);
  return names;
}

GptConfig GptConfig::preset(std::string_view name) {
  for (const auto& preset : presets()) {
    if (name == preset.name) return preset.config;
  }
  const std::string closest = detail::closest_match(name, preset_names());
  throw ConfigurationError(
      fmt::format("no model preset \"{}\"{}; presets are {}, or give the path of a config.json", name,
                  closest.empty() ? "" : fmt::format(" (did you mean \"{}\"?)", closest),
                  fmt::join(preset_names(), ", ")));
}

GptConfig GptConfig::from_json(std::string_view text, std::string_view file) {
  const JsonNode root = JsonNode::read<ConfigurationError>(text, file);
  if (!root["model_type"]) root["model_type"].fail("is missing; in that of a GPT2LMHeadModel it is \"gpt2\"");
  require_value(root["model_type"], "gpt2", "another architecture");
  require_value(root["activation_function"], "gelu_new", "another activation");
  require_value(root["scale_attn_weights"], true, "unscaled attention scores are not GPT-2's");
  require_value(root["scale_attn_by_inverse_layer_idx"], false, "scores scaled by layer are not GPT-2's");
  require_value(root["reorder_and_upcast_attn"], false, "scores are always fp32 here, and never reordered");
  require_value(root["add_cross_attention"], false, "there is no encoder to attend to");
  require_value(root["tie_word_embeddings"], true, "the head is the token embedding");
  refuse_quantized(root);

  GptConfig config;
  config.layers = size_of_either(root, "n_layer", "num_hidden_layers", config.layers);
  config.heads = size_of_either(root, "n_head", "num_attention_heads", config.heads);
  config.width = size_of_either(root, "n_embd", "hidden_size", config.width);
  config.vocabulary = root["vocab_size"].integer_or(config.vocabulary);
  // Older files use n_ctx; if both exist, n_positions is the size of the table.
  config.positions = size_of_either(root, "n_positions", "max_position_embeddings",
                                    root["n_ctx"].integer_or(config.positions));
  config.inner = root["n_inner"].integer_or(0, 1);
  if (config.inner % 4 == 0 && config.inner / 4 == config.width) config.inner = 0;
  config.embedding_dropout = float_or(config.embedding_dropout, root["embd_pdrop"]);
  config.attention_dropout = float_or(config.attention_dropout, root["attn_pdrop"]);
  config.residual_dropout = float_or(config.residual_dropout, root["resid_pdrop"]);
  config.layer_norm_epsilon = float_or(config.layer_norm_epsilon, root["layer_norm_epsilon"]);
  config.initializer_range = float_or(config.initializer_range, root["initializer_range"]);
  config.token_ids = read_token_ids(root);
  for (const auto& each : default_token_ids(config.vocabulary)) {
    const auto read = config.token_ids.find(each.first);
    if (read != config.token_ids.end() && *read == each) config.token_ids.erase(read);
  }
  config.validate(file);
  return config;
}

std::string GptConfig::to_json() const {
  json object = {{"architectures", {"GPT2LMHeadModel"}},
                 {"model_type", "gpt2"},
                 {"activation_function", "gelu_new"},
                 {"n_layer", layers},
                 {"n_head", heads},
                 {"n_embd", width},
                 {"n_inner", inner_width() != 4 * width ? json(inner) : json(nullptr)},
                 {"n_positions", positions},
                 {"n_ctx", positions},
                 {"vocab_size", vocabulary},
                 {"embd_pdrop", shortest_number(embedding_dropout)},
                 {"attn_pdrop", shortest_number(attention_dropout)},
                 {"resid_pdrop", shortest_number(residual_dropout)},
                 {"layer_norm_epsilon", shortest_number(layer_norm_epsilon)},
                 {"initializer_range", shortest_number(initializer_range)},
                 {"tie_word_embeddings", true}};
  for (const auto& ids : {default_token_ids(vocabulary), token_ids}) {
    for (const auto& [key, value] : ids) object[key] = json::parse(value);
  }
  return object.dump(2) + "\n";
}

void GptConfig::validate(std::string_view origin) const {
  struct Size {
    const char* key;
    std::int64_t value, least, most;
  };
  // These limits exceed any trained model, and are small enough that no product of them overflows.
  const Size sizes[] = {{"n_layer", layers, 1, most_layers},      {"n_head", heads, 1, most_width},
                        {"n_embd", width, 1, most_width},         {"n_inner", inner, 0, 4 * most_width},
                        {"vocab_size", vocabulary, 1, most_rows}, {"n_positions", positions, 1, most_rows}};
  for (const auto& [key, value, least, most] : sizes) {
    if (value < least)
      throw ConfigurationError(fmt::format("{}: \"{}\" is {}, but must be positive", origin, key, value));
    if (value > most) {
      throw ConfigurationError(
          fmt::format("{}: \"{}\" is {}, but models of at most {} are read", origin, key, value, most));
    }
  }
  if (width % heads != 0) {
    throw ConfigurationError(
        fmt::format("{}: \"n_head\" {} does not divide \"n_embd\" {}; every head needs the same width",
                    origin, heads, width));
  }
  const std::pair<const char*, float> probabilities[] = {{"embd_pdrop", embedding_dropout},
                                                         {"attn_pdrop", attention_dropout},
                                                         {"resid_pdrop", residual_dropout}};
  for (const auto& [key, value] : probabilities) {
    if (!(value >= 0 && value < 1)) {
      throw ConfigurationError(
          fmt::format("{}: \"{}\" is {}, but a probability in [0, 1) is wanted", origin, key, value));
    }
  }
  if (!(layer_norm_epsilon > 0)) {
    throw ConfigurationError(
        fmt::format("{}: \"layer_norm_epsilon\" is {}, but must be positive", origin, layer_norm_epsilon));
  }
  if (!(initializer_range >= 0)) {
    throw ConfigurationError(
        fmt::format("{}: \"initializer_range\" is {}, but must not be negative", origin, initializer_range));
  }
  if (parameters() > most_parameters) {
    throw ConfigurationError(fmt::format("{}: the model has {} parameters, but models of at most {} are read",
                                         origin, parameters(), most_parameters));
  }
}

std::int64_t GptConfig::parameters() const {
  const std::int64_t matrices =
      checked_add(checked_multiply(4 * width, width), checked_multiply(2 * width, inner_width()));
  const std::int64_t vectors = 4 * width + 3 * width + width + inner_width() + width;
  return checked_add(checked_multiply(layers, checked_add(matrices, vectors)),
                     checked_multiply(checked_add(checked_add(vocabulary, positions), 2), width));
}

double GptConfig::flops_per_token(std::int64_t sequence) const {
  const auto w = static_cast<double>(width), l = static_cast<double>(layers);
  const double weights =
      l * (4 * w * w + 2 * w * static_cast<double>(inner_width())) + static_cast<double>(vocabulary) * w;
  return 6 * weights + 6 * l * w * static_cast<double>(sequence + 1);
}

}  // namespace tranche::models
