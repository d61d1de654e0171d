#pragma once
/// The language models that a program supports, by the architecture in config.json and by name.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tranche/models/language_model.h"

namespace tranche::models {

/// An architecture in a registry.
struct Architecture {
  std::string name;        ///< in config.json's "architectures": "GPT2LMHeadModel"
  std::string model_type;  ///< config.json's "model_type": "gpt2"
  /// Makes the model from a config.json's text; errors name `file`. Throws ConfigurationError.
  std::function<std::shared_ptr<const LanguageModel>(std::string_view text, std::string_view file)> from_json;
  /// Models with a name: "gpt2-xl".
  std::vector<std::pair<std::string, std::shared_ptr<const LanguageModel>>> presets = {};
};

/// A value type: a program makes one, adds its own architectures, and passes it to the functions that read
/// models.
class ModelRegistry {
 public:
  /// Makes an empty registry.
  ModelRegistry() = default;
  /// Makes a registry with the architectures of this library.
  static ModelRegistry with_builtin();

  /// Throws InvalidArgument if the name of the architecture, its model_type or a preset already exists.
  void add(Architecture architecture);

  std::vector<std::string> architecture_names() const;
  std::vector<std::string> preset_names() const;

  /// The model with that name. Throws ConfigurationError listing the names, with the closest match.
  std::shared_ptr<const LanguageModel> preset(std::string_view name) const;
  /// Makes the model from a config.json in Hugging Face's format: by the first known entry of
  /// "architectures", else by "model_type". Throws ConfigurationError naming the file, and listing the
  /// architectures if this one is unknown.
  std::shared_ptr<const LanguageModel> from_json(std::string_view text, std::string_view file) const;
  /// Makes the model from a preset's name or the path of a config.json, like --model.
  std::shared_ptr<const LanguageModel> resolve(const std::string& preset_or_path) const;

 private:
  std::vector<Architecture> architectures_;
};

}  // namespace tranche::models
