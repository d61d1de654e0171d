#pragma once
/// The hyperparameters of a GPT: presets, Hugging Face's config.json, parameter and operation counts.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::models {

/// Hyperparameters of the GPT-2 architecture (Radford et al., 2019). Other settings in a GPT2LMHeadModel's
/// config.json are refused unless they have no effect on training.
struct GptConfig {
  std::int64_t layers = 12;
  std::int64_t heads = 12;
  std::int64_t width = 768;
  std::int64_t vocabulary = 50257;
  std::int64_t positions = 1024;  ///< longest sequence
  std::int64_t inner = 0;         ///< width of the MLP's hidden layer; 0: 4 * width
  float embedding_dropout = 0.1f;
  float attention_dropout = 0.1f;
  float residual_dropout = 0.1f;
  float layer_norm_epsilon = 1e-5f;
  float initializer_range = 0.02f;  ///< standard deviation of the initial weights
  /// The tokens that begin, end and pad texts, by their keys in config.json, as JSON text: {"eos_token_id",
  /// "[2, 7]"}. Training does not use them; what is written has those that were read,
  /// and transformers' 50256 for the begin and the end where none was read and the vocabulary has it.
  std::map<std::string, std::string> token_ids = {};

  std::int64_t inner_width() const { return inner > 0 ? inner : 4 * width; }

  /// gpt2, gpt2-medium, gpt2-large, gpt2-xl; gpt-mini (2.8 million parameters, bytes, 256 positions) and
  /// gpt-nano (bytes, tests). Throws ConfigurationError listing the names.
  static GptConfig preset(std::string_view name);
  static std::vector<std::string> preset_names();
  /// Reads Hugging Face's config.json. Errors name `file`. Throws ConfigurationError naming key and file for
  /// text that is not JSON, other model types, activations or attention variants, and invalid values.
  static GptConfig from_json(std::string_view text, std::string_view file);
  /// A config.json from which Hugging Face's GPT2LMHeadModel and from_json() read the same values.
  std::string to_json() const;

  /// Throws ConfigurationError when values are too large or inconsistent; `origin` names their source.
  void validate(std::string_view origin) const;

  /// The number of parameters; the tied head counts once.
  std::int64_t parameters() const;
  /// Operations of forward and backward of one token in a sequence of `sequence`:
  /// 6 * (layers * (4 width^2 + 2 width * inner) + vocabulary * width) + 6 * layers * width * (sequence + 1).
  /// The first term is 2 operations a matrix weight forward and 4 backward; the second the two matrix
  /// products of causal attention (on average (sequence + 1) / 2 keys a query, 4 * width operations a key
  /// forward, twice that backward). Norms, activations and recomputation are not counted.
  double flops_per_token(std::int64_t sequence) const;

  friend bool operator==(const GptConfig&, const GptConfig&) = default;
};

}  // namespace tranche::models
