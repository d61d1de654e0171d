#pragma once
/// The language models that a program knows, by the architecture in config.json and by name.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tranche/models/language_model.h"

namespace tranche::models {

/// An architecture that a registry holds.
struct Architecture {
  std::string name;        ///< in config.json's "architectures": "GPT2LMHeadModel"
  std::string model_type;  ///< config.json's "model_type": "gpt2"
  /// The model of a config.json's text; `file` is named in errors. Throws ConfigurationError.
  std::function<std::shared_ptr<const LanguageModel>(std::string_view text, std::string_view file)> from_json;
  /// Models that have a name of their own: "gpt2-xl".
  std::vector<std::pair<std::string, std::shared_ptr<const LanguageModel>>> presets = {};
};

/// A value: a program makes one, adds its own architectures, and hands it to what reads models.
class ModelRegistry {
 public:
  /// Holds nothing.
  ModelRegistry() = default;
  /// Holds the architectures of this library.
  static ModelRegistry with_builtin();

  /// Throws InvalidArgument where the name of the architecture, its model_type or a preset is taken.
  void add(Architecture architecture);

  std::vector<std::string> architecture_names() const;
  std::vector<std::string> preset_names() const;

  /// The model of that name. Throws ConfigurationError listing the names, with the closest match.
  std::shared_ptr<const LanguageModel> preset(std::string_view name) const;
  /// The model of a config.json of Hugging Face's form: by the first of "architectures" that is known, else
  /// by "model_type". Throws ConfigurationError naming the file, and the architectures where its own is not
  /// known.
  std::shared_ptr<const LanguageModel> from_json(std::string_view text, std::string_view file) const;
  /// A preset's name or the path of a config.json, as --model takes it.
  std::shared_ptr<const LanguageModel> resolve(const std::string& preset_or_path) const;

 private:
  std::vector<Architecture> architectures_;
};

}  // namespace tranche::models
