#include <fmt/format.h>
#include <sentencepiece_processor.h>

#include <string>
#include <vector>

#include "data/pair_encoding.h"
#include "tranche/core/error.h"
#include "tranche/data/tokenizer.h"

namespace tranche::data {

namespace {

/// The bytes of a piece, whose U+2581 is a space. Control tokens have none.
std::string bytes_of(const sentencepiece::SentencePieceProcessor& model, int token) {
  if (model.IsControl(token)) return {};
  std::string text = model.IdToPiece(token);
  if (model.IsByte(token)) {  // <0x0A>
    return {static_cast<char>(std::stoi(text.substr(3, 2), nullptr, 16))};
  }
  for (std::size_t at = text.find(visible_space); at != std::string::npos;
       at = text.find(visible_space, at)) {
    text.replace(at, visible_space.size(), " ");
  }
  return text;
}

class SentencePieceTokenizer : public Tokenizer {
 public:
  SentencePieceTokenizer(std::string_view model, std::string_view origin) {
    const auto status = model_.LoadFromSerializedProto(model);
    if (!status.ok() || model_.GetPieceSize() == 0) {
      throw ConfigurationError(fmt::format("{} is not a SentencePiece model: {}", origin, status.ToString()));
    }
    for (int token = 0; token < model_.GetPieceSize(); ++token) bytes_.push_back(bytes_of(model_, token));
    SpecialTokens special;
    if (model_.bos_id() >= 0) special.before = {model_.bos_id()};
    if (model_.eos_id() >= 0) special.end = model_.eos_id();
    set_special(std::move(special));
  }

  std::int64_t vocabulary() const override { return model_.GetPieceSize(); }
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<int> tokens;
    if (const auto status = model_.Encode(text, &tokens); !status.ok()) {
      throw ConfigurationError("SentencePiece cannot encode the text: " + status.ToString());
    }
    return tokens;
  }
  std::string_view decode(std::int32_t token) const override {
    return token < 0 || token >= vocabulary() ? std::string_view() : bytes_[static_cast<std::size_t>(token)];
  }
  std::string decode(std::span<const std::int32_t> tokens) const override {
    std::string text;
    for (const std::int32_t token : tokens) text += decode(token);
    if (text.starts_with(' ')) text.erase(0, 1);
    return text;
  }
  std::optional<std::int32_t> find(std::string_view name) const override {
    const int token = model_.PieceToId(name);
    if (model_.IsUnknown(token)) return std::nullopt;
    return token;
  }

 private:
  sentencepiece::SentencePieceProcessor model_;
  std::vector<std::string> bytes_;  ///< by token
};

}  // namespace

std::unique_ptr<Tokenizer> read_sentencepiece(std::string_view model, std::string_view origin) {
  return std::make_unique<SentencePieceTokenizer>(model, origin);
}

}  // namespace tranche::data
