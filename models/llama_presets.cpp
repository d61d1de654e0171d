#include <fmt/core.h>
#include <fmt/ranges.h>

#include "core/closest_match.h"
#include "tranche/core/error.h"
#include "tranche/models/llama_config.h"

namespace tranche::models {

namespace {

using kernels::RopeScaling;

struct LlamaPreset {
  const char* name;
  LlamaConfig config;
};

/// Byte models.
LlamaConfig llama_bytes(std::int64_t layers, std::int64_t heads, std::int64_t width, std::int64_t inner,
                        std::int64_t positions) {
  return {.layers = layers,
          .heads = heads,
          .key_value_heads = heads / 2,
          .head_dim = width / heads,
          .width = width,
          .inner = inner,
          .vocabulary = 256,
          .positions = positions,
          .token_ids = {{"bos_token_id", "null"}, {"eos_token_id", "null"}}};  // transformers' are 1 and 2
}

LlamaConfig llama_160m() {
  return {.layers = 12, .heads = 12, .key_value_heads = 12, .head_dim = 64, .width = 768, .inner = 3072};
}

LlamaConfig llama_2_7b() {
  LlamaConfig config;
  config.positions = 4096;
  config.norm_epsilon = 1e-5f;
  return config;
}

/// The common values of Llama 3.1 and 3.2.
LlamaConfig llama_3(std::int64_t layers, std::int64_t heads, std::int64_t width, std::int64_t inner) {
  return {.layers = layers,
          .heads = heads,
          .key_value_heads = 8,
          .head_dim = 128,
          .width = width,
          .inner = inner,
          .vocabulary = 128256,
          .positions = 131072,
          .rope_theta = 500000,
          .rope = {.kind = RopeScaling::Kind::llama3, .factor = 8, .original_positions = 8192},
          .norm_epsilon = 1e-5f,
          .token_ids = {{"bos_token_id", "128000"}, {"eos_token_id", "128001"}}};
}

LlamaConfig llama_3_2(std::int64_t layers, std::int64_t heads, std::int64_t head_dim, std::int64_t width) {
  LlamaConfig config = llama_3(layers, heads, width, 8192);
  config.head_dim = head_dim;
  config.rope.factor = 32;
  config.tied = true;
  return config;
}

LlamaConfig mistral_7b() {
  LlamaConfig config = llama_2_7b();
  config.kind = LlamaKind::mistral;
  config.key_value_heads = 8;
  config.inner = 14336;
  config.positions = 32768;
  config.window = 4096;
  return config;
}

LlamaConfig qwen(LlamaKind kind, std::int64_t layers, std::int64_t heads, std::int64_t key_value_heads,
                 std::int64_t head_dim, std::int64_t width, std::int64_t inner) {
  return {.kind = kind,
          .layers = layers,
          .heads = heads,
          .key_value_heads = key_value_heads,
          .head_dim = head_dim,
          .width = width,
          .inner = inner,
          .vocabulary = 151936,
          .positions = kind == LlamaKind::qwen2 ? 32768 : 40960,
          .rope_theta = 1000000};
}

std::vector<LlamaPreset> llama_presets() {
  LlamaConfig qwen3_nano = llama_bytes(2, 4, 24, 48, 64);
  qwen3_nano.kind = LlamaKind::qwen3;
  qwen3_nano.head_dim = 8;
  qwen3_nano.tied = true;
  LlamaConfig qwen2_half = qwen(LlamaKind::qwen2, 24, 14, 2, 64, 896, 4864);
  LlamaConfig qwen2_1_5b = qwen(LlamaKind::qwen2, 28, 12, 2, 128, 1536, 8960);
  LlamaConfig qwen2_3b = qwen(LlamaKind::qwen2, 36, 16, 2, 128, 2048, 11008);
  LlamaConfig qwen2_7b = qwen(LlamaKind::qwen2, 28, 28, 4, 128, 3584, 18944);
  LlamaConfig qwen3_half = qwen(LlamaKind::qwen3, 28, 16, 8, 128, 1024, 3072);
  qwen2_half.tied = qwen2_1_5b.tied = qwen2_3b.tied = qwen3_half.tied = true;
  qwen2_1_5b.positions = 131072;
  qwen2_7b.vocabulary = 152064;
  qwen2_7b.positions = 131072;
  return {{"llama-nano", llama_bytes(2, 4, 32, 88, 64)},
          {"qwen3-nano", qwen3_nano},
          {"llama-mini", llama_bytes(6, 4, 128, 352, 256)},
          {"llama-160m", llama_160m()},
          {"qwen2.5-0.5b", qwen2_half},
          {"qwen3-0.6b", qwen3_half},
          {"qwen2.5-1.5b", qwen2_1_5b},
          {"qwen2.5-3b", qwen2_3b},
          {"llama-3.2-1b", llama_3_2(16, 32, 64, 2048)},
          {"llama-3.2-3b", llama_3_2(28, 24, 128, 3072)},
          {"llama-2-7b", llama_2_7b()},
          {"mistral-7b", mistral_7b()},
          {"qwen2.5-7b", qwen2_7b},
          {"llama-3.1-8b", llama_3(32, 32, 4096, 14336)},
          {"qwen3-8b", qwen(LlamaKind::qwen3, 36, 32, 8, 128, 4096, 12288)},
          {"llama-3.1-70b", llama_3(80, 64, 8192, 28672)},
          {"llama-3.1-405b", llama_3(126, 128, 16384, 53248)}};
}

}  // namespace

std::vector<std::string> LlamaConfig::preset_names() {
  std::vector<std::string> names;
  for (const auto& preset : llama_presets()) names.emplace_back(preset.name);
  return names;
}

LlamaConfig LlamaConfig::preset(std::string_view name) {
  for (const auto& preset : llama_presets()) {
    if (name == preset.name) return preset.config;
  }
  const std::string closest = detail::closest_match(name, preset_names());
  throw ConfigurationError(fmt::format("no preset of the Llama family is \"{}\"{}; presets are {}", name,
                                       closest.empty() ? "" : fmt::format(" (did you mean \"{}\"?)", closest),
                                       fmt::join(preset_names(), ", ")));
}

}  // namespace tranche::models
