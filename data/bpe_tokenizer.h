#pragma once
/// Tokenizers of byte pair encoding, as the parts that their files describe.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "data/pair_encoding.h"
#include "data/word_pattern.h"
#include "tranche/data/tokenizer.h"

namespace tranche::data {

/// A token that is found in the text before any other: "<|endoftext|>".
struct AddedToken {
  std::string text;
  std::int32_t token = 0;
  bool normalized = false;  ///< it is looked for in the normalized text
};

struct BpeDefinition {
  PairEncoding pairs{PairEncoding::Symbols::bytes};
  std::vector<AddedToken> added;
  bool composes = false;              ///< NFC
  std::vector<WordPattern> patterns;  ///< each splits the words of the one before
  bool whole_words = false;           ///< "ignore_merges"
  enum class Prefix : std::uint8_t { never, first, always };
  Prefix space_before = Prefix::never;  ///< U+2581 before the first piece of a text, or before each
  bool space_once = false;              ///< not where the piece begins with a space
  bool visible_spaces = false;          ///< spaces become U+2581
  bool strips_space = false;            ///< decode() drops the first space
  SpecialTokens special;
};

class BpeTokenizer : public Tokenizer {
 public:
  explicit BpeTokenizer(BpeDefinition definition);
  std::int64_t vocabulary() const override { return parts_.pairs.vocabulary(); }
  std::vector<std::int32_t> encode(std::string_view text) const override;
  std::string_view decode(std::int32_t token) const override { return parts_.pairs.bytes_of(token); }
  std::string decode(std::span<const std::int32_t> tokens) const override;
  std::optional<std::int32_t> find(std::string_view name) const override;

 private:
  /// Added tokens by the byte that they begin with, longest first.
  using Finder = std::array<std::vector<AddedToken>, 256>;
  struct Call;
  template <typename Text, typename Token>
  static void split_added(std::string_view text, const Finder& finder, const Text& visit_text,
                          const Token& visit_token);
  void encode_text(std::string_view text, bool first, Call& call) const;
  void encode_words(std::string_view text, std::size_t pattern, Call& call) const;
  void encode_word(std::string_view word, Call& call) const;

  BpeDefinition parts_;
  Finder raw_, normalized_;
};

}  // namespace tranche::data
