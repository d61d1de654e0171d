#include "tranche/data/tokenizer.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/json_node.h"
#include "core/text_file.h"
#include "tranche/core/error.h"

namespace tranche::data {

namespace {

class ByteTokenizer : public Tokenizer {
 public:
  std::int64_t vocabulary() const override { return 256; }
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

/// The token that ends a document: "eos_token" of tokenizer_config.json, or a usual name. That file also says
/// for SentencePiece which tokens are added.
void complete(const std::string& folder, bool sentencepiece, Tokenizer& tokenizer) {
  SpecialTokens special = tokenizer.special();
  const std::string path = folder + "/tokenizer_config.json";
  if (is_there(path)) {
    const auto root = detail::JsonNode::read<ConfigurationError>(detail::read_text_file(path, what), path);
    if (const detail::JsonNode end = root["eos_token"]) {
      const std::string name = end.json().is_object() ? end["content"].text() : end.text();
      special.end = tokenizer.find(name);
      if (!special.end) end.fail(fmt::format("is '{}', which the tokenizer does not have", name));
    }
    const auto off = [&](const char* key) { return root[key] && !root[key].boolean(); };
    const auto on = [&](const char* key) { return root[key] && root[key].boolean(); };
    if (sentencepiece && off("add_bos_token")) special.before.clear();
    if (sentencepiece && on("add_eos_token") && special.end) special.after = {*special.end};
  }
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>"}) {
    if (!special.end) special.end = tokenizer.find(name);
  }
  tokenizer.set_special(std::move(special));
}

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() {
  return std::make_unique<ByteTokenizer>();
}

bool has_tokenizer(const std::string& folder) {
  return is_there(folder + "/tokenizer.json") || is_there(folder + "/tokenizer.model") ||
         (is_there(folder + "/vocab.json") && is_there(folder + "/merges.txt"));
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder) {
  // Pipes and devices are refused by read_text_file().
  const std::string json = folder + "/tokenizer.json", model = folder + "/tokenizer.model";
  std::unique_ptr<Tokenizer> tokenizer;
  if (is_there(json)) {
    tokenizer = read_tokenizer_json(detail::read_text_file(json, what), json);
  } else if (is_there(model)) {
    tokenizer = read_sentencepiece(detail::read_text_file(model, what), model);
  } else if (is_there(folder + "/vocab.json")) {
    tokenizer = read_vocabulary_and_merges(detail::read_text_file(folder + "/vocab.json", what),
                                           detail::read_text_file(folder + "/merges.txt", what), folder);
  } else {
    throw ConfigurationError(fmt::format(
        "'{}' has no tokenizer: neither tokenizer.json nor tokenizer.model, nor vocab.json with merges.txt",
        folder));
  }
  complete(folder, !is_there(json) && is_there(model), *tokenizer);
  return tokenizer;
}

}  // namespace tranche::data
