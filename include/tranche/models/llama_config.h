#pragma once
/// The hyperparameters of a model of the Llama family: presets, Hugging Face's config.json, parameter and
/// operation counts.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/kernels/rope_scaling.h"

namespace tranche::models {

/// The architectures of transformers that the class Llama implements: RMSNorm, rotary positions, grouped
/// heads, SwiGLU.
enum class LlamaKind : std::uint8_t {
  llama,    ///< LlamaForCausalLM (Touvron et al., 2023)
  mistral,  ///< MistralForCausalLM: every layer may have a window (Jiang et al., 2023)
  qwen2,    ///< Qwen2ForCausalLM: biases on query, key and value; windows by layer
  qwen3,    ///< Qwen3ForCausalLM: norms of query and key; windows by layer
};

/// Hyperparameters. Other settings in config.json are refused unless they have no effect on training.
struct LlamaConfig {
  LlamaKind kind = LlamaKind::llama;
  std::int64_t layers = 32;
  std::int64_t heads = 32;
  std::int64_t key_value_heads = 32;  ///< divides heads; 1: multi-query attention
  std::int64_t head_dim = 128;        ///< even; heads * head_dim may differ from width
  std::int64_t width = 4096;
  std::int64_t inner = 11008;  ///< width of the MLP's hidden layer
  std::int64_t vocabulary = 32000;
  std::int64_t positions = 2048;  ///< longest sequence
  double rope_theta = 10000;
  kernels::RopeScaling rope = {};
  std::int64_t window = 0;          ///< tokens that a query sees, including its own; 0: all before it
  std::vector<bool> windowed = {};  ///< by layer; empty: every layer has the window
  bool tied = false;                ///< the head is the token embedding
  bool attention_bias = false;      ///< llama, qwen3: on all four projections (qwen2 always has q, k and v)
  bool mlp_bias = false;            ///< llama
  float attention_dropout = 0;
  float norm_epsilon = 1e-6f;
  float initializer_range = 0.02f;  ///< standard deviation of the initial weights
  /// The tokens that begin, end and pad texts, by their keys in config.json, as JSON text: {"eos_token_id",
  /// "[2, 7]"}. Training does not use them; what is written has those that were read, and
  /// no others: transformers then takes its own, 1 and 2 for llama and mistral.
  std::map<std::string, std::string> token_ids = {};

  bool query_key_value_bias() const { return attention_bias || kind == LlamaKind::qwen2; }
  bool output_bias() const { return attention_bias; }
  bool query_key_norm() const { return kind == LlamaKind::qwen3; }
  std::int64_t query_width() const { return heads * head_dim; }
  std::int64_t key_value_width() const { return key_value_heads * head_dim; }
  /// Window of a layer; 0: none.
  std::int64_t window_of(std::int64_t layer) const {
    return windowed.empty() || windowed[static_cast<std::size_t>(layer)] ? window : 0;
  }

  /// Hugging Face's name of the architecture ("LlamaForCausalLM"), and its model_type ("llama").
  std::string_view architecture() const;
  std::string_view model_type() const;
  /// The names of all supported architectures, and of their model types.
  static std::vector<std::string> architectures();
  static std::vector<std::string> model_types();

  /// llama-mini (1.2 million parameters, bytes, 256 positions), llama-nano and qwen3-nano (bytes, tests),
  /// llama-160m, llama-2-7b, llama-3.1-8b, -70b and -405b, llama-3.2-1b and -3b, mistral-7b, qwen2.5-0.5b,
  /// -1.5b, -3b and -7b, qwen3-0.6b and -8b. Throws ConfigurationError listing the names.
  static LlamaConfig preset(std::string_view name);
  static std::vector<std::string> preset_names();
  /// Reads Hugging Face's config.json in the formats of transformers 4 (rope_theta, rope_scaling,
  /// torch_dtype) and 5 (rope_parameters, dtype); missing keys have the architecture's defaults there. Errors
  /// name `file`. Throws ConfigurationError naming key and file for text that is not JSON, other
  /// architectures, unsupported settings, and invalid values.
  static LlamaConfig from_json(std::string_view text, std::string_view file);
  /// A config.json from which transformers 4 and 5 and from_json() read the same values.
  std::string to_json() const;

  /// Throws ConfigurationError when values are too large or inconsistent; `origin` names their source.
  void validate(std::string_view origin) const;

  /// The number of parameters; a tied head counts once.
  std::int64_t parameters() const;
  /// Operations of forward and backward of one token in a sequence of `sequence`: 6 for each matrix weight
  /// (the head's too, the embedding's not) and 12 * heads * head_dim for each key that a query sees, on
  /// average over the sequence: (sequence + 1) / 2 without a window. Norms, rotations, activations and
  /// recomputation are not counted.
  double flops_per_token(std::int64_t sequence) const;

  friend bool operator==(const LlamaConfig&, const LlamaConfig&) = default;
};

}  // namespace tranche::models
