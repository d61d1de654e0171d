#include "training/sentencepiece_tokenizer.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "training/bpe_tokenizer.h"
#include "training/pair_encoding.h"
#include "training/sentencepiece_model.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

using PieceKind = SentencePieceModel::Kind;

[[noreturn]] void refuse(std::string_view origin, const std::string& why) {
  throw ConfigurationError(fmt::format("{} {}", origin, why));
}

/// The bytes of a piece, in which U+2581 is a space.
std::string bytes_of(const SentencePieceModel::Piece& piece) {
  if (piece.kind == PieceKind::control) return piece.text;
  if (piece.kind == PieceKind::byte) {  // <0x0A>
    const int byte = byte_of_name(piece.text);
    return byte < 0 ? piece.text : std::string(1, static_cast<char>(byte));
  }
  return with_spaces(piece.text);
}

/// Uses Debian's library, which encodes the text between added tokens.
class SentencePieceTokenizer : public Tokenizer {
 public:
  SentencePieceTokenizer(const SentencePieceModel& model, std::string_view bytes, std::string_view origin,
                         AddedTokens added, SpecialTokens special)
      : strips_(model.adds_prefix), added_(std::move(added)), finder_(added_.tokens()) {
    const auto status = library_.LoadFromSerializedProto(bytes);
    if (!status.ok()) refuse(origin, "is not a SentencePiece model: " + status.ToString());
    for (const auto& piece : model.pieces) bytes_.push_back(bytes_of(piece));
    for (const AddedToken& token : added_.tokens()) {
      const auto place = static_cast<std::size_t>(token.token);
      if (place >= bytes_.size()) bytes_.resize(place + 1);
      bytes_[place] = token.text;
    }
    set_special(std::move(special));
  }

  std::int64_t vocabulary() const override { return static_cast<std::int64_t>(bytes_.size()); }
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> tokens;
    finder_.split(
        text,
        [&](std::string_view piece, std::size_t) {
          std::vector<int> encoded;
          if (const auto status = library_.Encode(piece, &encoded); !status.ok())
            throw ConfigurationError("SentencePiece cannot encode the text: " + status.ToString());
          tokens.insert(tokens.end(), encoded.begin(), encoded.end());
        },
        [&](std::int32_t token, std::size_t) { tokens.push_back(token); });
    return tokens;
  }
  std::vector<std::int32_t> encode(std::string_view text, std::vector<std::size_t>& begins) const override {
    std::vector<std::int32_t> tokens;
    begins.clear();
    finder_.split(
        text,
        [&](std::string_view piece, std::size_t begin) {
          const auto encoded = library_.EncodeAsImmutableProto(piece);
          for (std::size_t i = 0; i < encoded.pieces_size(); ++i) {
            tokens.push_back(static_cast<std::int32_t>(encoded.pieces(static_cast<int>(i)).id()));
            begins.push_back(begin + encoded.pieces(static_cast<int>(i)).begin());
          }
        },
        [&](std::int32_t token, std::size_t begin) {
          tokens.push_back(token);
          begins.push_back(begin);
        });
    return tokens;
  }
  std::string_view decode(std::int32_t token) const override {
    return token < 0 || token >= vocabulary() ? std::string_view() : bytes_[static_cast<std::size_t>(token)];
  }
  std::string decode(std::span<const std::int32_t> tokens) const override {
    std::string text;
    for (const std::int32_t token : tokens) text += decode(token);
    if (strips_ && text.starts_with(' ')) text.erase(0, 1);
    return text;
  }
  std::optional<std::int32_t> find(std::string_view name) const override { return added_.find(name); }

 private:
  sentencepiece::SentencePieceProcessor library_;
  bool strips_;
  std::vector<std::string> bytes_;  ///< by token
  AddedTokens added_;
  AddedTokenFinder finder_;
};

/// The names of pieces by their numbers. A list of added tokens may rename pieces, but a name that another
/// piece keeps belongs to that piece.
BaseVocabulary vocabulary_of(const SentencePieceModel& model, const TokenizerLayout& layout,
                             std::string_view origin) {
  const auto size = static_cast<std::int32_t>(model.pieces.size());
  std::unordered_map<std::string, std::int32_t> tokens;
  for (std::int32_t token = 0; token < size; ++token)
    tokens.emplace(model.pieces[static_cast<std::size_t>(token)].text, token);
  if (layout.kind != TokenizerClass::llama) {
    std::vector<const NamedToken*> renamed;
    for (const NamedToken& token : layout.listed) {
      if (!token.token || *token.token >= size) continue;
      const SentencePieceModel::Piece& piece = model.pieces[static_cast<std::size_t>(*token.token)];
      const auto other = tokens.find(token.text);
      if (piece.text == token.text || other != tokens.end()) continue;
      if (piece.kind != PieceKind::control && piece.kind != PieceKind::unused) {
        token.fail(fmt::format("gives '{}' the number {}, which is the piece '{}' of {}", token.text,
                               *token.token, piece.text, origin));
      }
      renamed.push_back(&token);
    }
    for (const NamedToken* const token : renamed) {
      tokens.erase(model.pieces[static_cast<std::size_t>(*token->token)].text);
      tokens.emplace(token->text, *token->token);
    }
  }
  return {size, [tokens = std::move(tokens)](std::string_view text) -> std::optional<std::int32_t> {
            const auto found = tokens.find(std::string(text));
            if (found == tokens.end()) return std::nullopt;
            return found->second;
          }};
}

/// Adds merges as transformers derives them from the pieces: all ways to form a piece from two others.
/// LlamaTokenizer orders them by the pieces' numbers, the general class by their scores.
void add_merges(const SentencePieceModel& model, bool by_score, const BaseVocabulary& base,
                PairEncoding& pairs) {
  struct Merge {
    float score;
    std::int32_t token, left_token, right_token;
    std::size_t left_letters;
    std::string_view left, right;
  };
  std::vector<Merge> merges;
  const auto normal = [&](std::int32_t token) {
    return !by_score || model.pieces[static_cast<std::size_t>(token)].kind == PieceKind::normal;
  };
  for (std::size_t token = 0; token < model.pieces.size(); ++token) {
    const SentencePieceModel::Piece& piece = model.pieces[token];
    const std::string_view text = piece.text;
    if (!normal(static_cast<std::int32_t>(token))) continue;
    std::size_t letters = 1;
    for (std::size_t at = 1; at < text.size(); ++at) {
      if ((static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) continue;
      const auto left = base.find(text.substr(0, at)), right = base.find(text.substr(at));
      if (left && right && normal(*left) && normal(*right)) {
        merges.push_back({by_score ? -piece.score : 0, static_cast<std::int32_t>(token), *left, *right,
                          letters, text.substr(0, at), text.substr(at)});
      }
      ++letters;
    }
  }
  std::stable_sort(merges.begin(), merges.end(), [by_score](const Merge& a, const Merge& b) {
    if (a.score != b.score) return a.score < b.score;
    if (a.token != b.token) return a.token < b.token;
    return by_score ? a.left < b.left : a.left_letters < b.left_letters;
  });
  for (const Merge& merge : merges) (void)pairs.add_merge(merge.left, merge.right);
}

/// Refuses settings that SentencePiece and transformers implement differently. LlamaTokenizer ignores those
/// for spaces.
void require_plain(const SentencePieceModel& model, bool llama, std::string_view origin) {
  constexpr std::string_view why =
      ", which SentencePiece and transformers do in different ways, so it is not supported; supported are "
      "models of type bpe with the normalizer rule identity and remove_extra_whitespaces false, such as "
      "those of Llama and Mistral";
  if (!model.pair_encoding)
    refuse(origin, fmt::format("is not of byte pair encoding (trainer_spec.model_type){}", why));
  if (model.normalizes) refuse(origin, fmt::format("changes characters by a table (normalizer_spec){}", why));
  if (!llama && model.removes_spaces) refuse(origin, fmt::format("removes spaces (normalizer_spec){}", why));
  if (!model.escapes_spaces) refuse(origin, fmt::format("keeps spaces as they are (normalizer_spec){}", why));
}

/// Makes a tokenizer as transformers' own reader does, for cases in which it differs from the library.
std::unique_ptr<Tokenizer> make_pair_encoding(const SentencePieceModel& model, const TokenizerLayout& layout,
                                              std::string_view origin) {
  const bool llama = layout.kind == TokenizerClass::llama;
  const std::string who = llama ? "as LlamaTokenizer reads it" : "with \"legacy\": false";
  BpeDefinition parts;
  parts.pairs = PairEncoding(PairEncoding::Symbols::characters);
  for (std::size_t token = 0; token < model.pieces.size(); ++token) {
    const SentencePieceModel::Piece& piece = model.pieces[token];
    if (piece.text.size() > longest_added_token)
      refuse(origin, fmt::format("has a piece of {} bytes", piece.text.size()));
    if (!llama && piece.kind == PieceKind::user_defined)
      refuse(origin,
             fmt::format("has the user-defined piece '{}', which is not supported {}", piece.text, who));
    (void)parts.pairs.add_token(piece.text, static_cast<std::int32_t>(token));
  }
  if (const int byte = parts.pairs.byte_without_token(); byte >= 0)
    refuse(origin,
           fmt::format("has no piece for byte {} (byte_fallback), which is not supported {}", byte, who));
  const BaseVocabulary base = vocabulary_of(model, layout, origin);
  add_merges(model, !llama, base, parts.pairs);
  using Prefix = BpeDefinition::Prefix;
  const bool prefix = llama ? layout.prefix_space.value_or(true) : model.adds_prefix;
  parts.space_before = !prefix                                  ? Prefix::never
                       : llama && layout.legacy.value_or(false) ? Prefix::always
                                                                : Prefix::first;
  parts.space_once = true;
  parts.visible_spaces = true;
  parts.strips_space = prefix;
  parts.special = add_tokens(layout, base, parts.added);
  for (const AddedToken& token : parts.added.tokens()) {
    if (!parts.pairs.add_special(token.text, token.token))
      refuse(origin, fmt::format("has another piece under {}, the number of '{}'", token.token, token.text));
  }
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

}  // namespace

std::unique_ptr<Tokenizer> read_sentencepiece(std::string_view bytes, std::string_view origin,
                                              TokenizerLayout layout) {
  const SentencePieceModel model = read_sentencepiece_model(bytes, origin);
  const bool llama = layout.kind == TokenizerClass::llama;
  require_plain(model, llama, origin);
  if (layout.kind != TokenizerClass::unnamed && layout.kind != TokenizerClass::generic && !llama)
    refuse(origin, fmt::format("is not a vocabulary of {}, which tokenizer_config.json or config.json names",
                               layout.kind_name));
  if (!layout.has_extra) {
    layout.extra.clear();
    for (const SentencePieceModel::Piece& piece : model.pieces) {
      // The library finds user-defined pieces itself.
      if (piece.kind == PieceKind::control || (llama && piece.kind == PieceKind::user_defined))
        layout.extra.push_back({piece.text, false, std::nullopt, std::nullopt});
    }
  }
  if (!llama) {
    if (!model.begin.empty()) layout.set_default("bos_token", model.begin);
    if (!model.end.empty()) layout.set_default("eos_token", model.end);
    if (!model.unknown.empty()) layout.set_default("unk_token", model.unknown);
    // Added tokens are searched in the unnormalized text.
    for (NamedToken& token : layout.listed) token.normalized = token.normalized && !model.adds_prefix;
    layout.require_raw(
        [](const std::string& text) {
          return text.find(' ') != std::string::npos || text.find(visible_space) != std::string::npos;
        },
        "where it has a space, with tokenizer.model");
  }
  if (llama || !layout.legacy.value_or(true)) return make_pair_encoding(model, layout, origin);
  AddedTokens added;
  SpecialTokens special = add_tokens(layout, vocabulary_of(model, layout, origin), added);
  return std::make_unique<SentencePieceTokenizer>(model, bytes, origin, std::move(added), std::move(special));
}

std::unique_ptr<Tokenizer> read_sentencepiece(std::string_view model, std::string_view origin) {
  return read_sentencepiece(model, origin, {});
}

}  // namespace tranche::training
