#include "tranche/training/tokenizer.h"

#include <fmt/format.h>

#include <filesystem>

#include "checkpoint/digest.h"
#include "core/text_file.h"
#include "training/sentencepiece_tokenizer.h"
#include "training/tokenizer_json.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

class ByteTokenizer : public Tokenizer {
 public:
  std::int64_t vocabulary() const override { return 256; }
  using Tokenizer::encode;
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> tokens;
    tokens.reserve(text.size());
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }
  std::string_view decode(std::int32_t token) const override {
    static const std::string bytes = [] {
      std::string all(256, '\0');
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<char>(i);
      return all;
    }();
    if (token < 0 || token >= 256) return {};
    return std::string_view(bytes).substr(static_cast<std::size_t>(token), 1);
  }
  std::string decode(std::span<const std::int32_t> tokens) const override {
    std::string text;
    for (const std::int32_t token : tokens) text += decode(token);
    return text;
  }
  std::optional<std::int32_t> find(std::string_view) const override { return std::nullopt; }
};

constexpr const char* what = "tokenizer file";

bool is_there(const std::string& path) {
  std::error_code none;
  return std::filesystem::exists(path, none);
}

/// Pipes and devices are refused.
std::optional<std::string> read_if_there(const std::string& path) {
  if (!is_there(path)) return std::nullopt;
  return detail::read_text_file(path, what);
}

}  // namespace

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, std::vector<std::size_t>& begins) const {
  std::vector<std::int32_t> tokens = encode(text);
  begins.clear();
  std::size_t at = 0;
  for (const std::int32_t token : tokens) {
    begins.push_back(at);
    at += decode(token).size();
  }
  return tokens;
}

std::string vocabulary_digest(const Tokenizer& tokenizer) {
  std::string tokens;  // each behind its length
  for (std::int64_t token = 0; token < tokenizer.vocabulary(); ++token) {
    const std::string_view bytes = tokenizer.decode(static_cast<std::int32_t>(token));
    tokens += fmt::format("{}:", bytes.size());
    tokens += bytes;
  }
  return checkpoint::to_hex(checkpoint::digest_of(tokens));
}

std::unique_ptr<Tokenizer> make_byte_tokenizer() {
  return std::make_unique<ByteTokenizer>();
}

bool has_tokenizer(const std::string& folder) {
  return is_there(folder + "/tokenizer.json") || is_there(folder + "/tokenizer.model") ||
         (is_there(folder + "/vocab.json") && is_there(folder + "/merges.txt"));
}

std::unique_ptr<Tokenizer> read_tokenizer(const TokenizerFiles& files, const std::string& folder) {
  if (files.tokenizer_json) return read_tokenizer_json(files, folder);
  if (files.tokenizer_model) {
    return read_sentencepiece(*files.tokenizer_model, folder + "/tokenizer.model",
                              read_layout(files, folder, {}, false));
  }
  if (files.vocabulary && files.merges) return read_vocabulary_and_merges(files, folder);
  throw ConfigurationError(fmt::format(
      "'{}' has no tokenizer: neither tokenizer.json nor tokenizer.model, nor vocab.json with merges.txt",
      folder));
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder) {
  std::error_code none;
  if (!std::filesystem::exists(folder, none))
    throw ConfigurationError(
        fmt::format("there is no folder '{}' of a tokenizer, and nothing is downloaded", folder));
  if (std::filesystem::is_regular_file(folder, none)) {
    throw ConfigurationError(fmt::format(
        "'{}' is a file; a tokenizer is named by the folder that holds its files, as several count", folder));
  }
  const auto read = [&](const char* name) { return read_if_there(folder + "/" + name); };
  TokenizerFiles files;
  files.tokenizer_json = read("tokenizer.json");
  if (!files.tokenizer_json) files.tokenizer_model = read("tokenizer.model");
  if (!files.tokenizer_json && !files.tokenizer_model && is_there(folder + "/vocab.json")) {
    files.vocabulary = read("vocab.json");
    files.merges = detail::read_text_file(folder + "/merges.txt", what);
  }
  if (!files.tokenizer_json && !files.tokenizer_model && !files.vocabulary &&
      is_there(folder + "/tekken.json")) {
    throw ConfigurationError(
        fmt::format("'{}' has no tokenizer that can be read: tekken.json is Mistral's own format; put the "
                    "tokenizer.json of the "
                    "model's Hugging Face folder beside it",
                    folder));
  }
  files.tokenizer_config = read("tokenizer_config.json");
  files.special_tokens_map = read("special_tokens_map.json");
  files.added_tokens = read("added_tokens.json");
  files.model_config = read("config.json");
  return read_tokenizer(files, folder);
}

}  // namespace tranche::training
