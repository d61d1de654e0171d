#pragma once
/// Tokenizers of byte pair encoding, assembled from the parts that their files describe.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "training/added_tokens.h"
#include "training/pair_encoding.h"
#include "training/word_pattern.h"
#include "tranche/training/tokenizer.h"

namespace tranche::training {

struct BpeDefinition {
  PairEncoding pairs{PairEncoding::Symbols::bytes};
  AddedTokens added;
  bool composes = false;              ///< NFC
  std::vector<WordPattern> patterns;  ///< each splits the words of the previous one
  bool whole_words = false;           ///< "ignore_merges"
  enum class Prefix : std::uint8_t { never, first, always };
  Prefix space_before = Prefix::never;  ///< U+2581 before the first piece of a text, or before each
  bool space_once = false;              ///< but not if the piece begins with a space
  bool blank_before = false;            ///< a space before each piece that does not begin with one
  bool visible_spaces = false;          ///< spaces become U+2581
  bool strips_space = false;            ///< decode() drops the first space
  SpecialTokens special;
};

class BpeTokenizer : public Tokenizer {
 public:
  explicit BpeTokenizer(BpeDefinition definition);
  std::int64_t vocabulary() const override { return parts_.pairs.vocabulary(); }
  std::vector<std::int32_t> encode(std::string_view text) const override;
  std::vector<std::int32_t> encode(std::string_view text, std::vector<std::size_t>& begins) const override;
  std::string_view decode(std::int32_t token) const override { return parts_.pairs.bytes_of(token); }
  std::string decode(std::span<const std::int32_t> tokens) const override;
  std::optional<std::int32_t> find(std::string_view name) const override;

 private:
  struct Call;
  void encode(std::string_view text, Call& call) const;
  void encode_text(std::string_view text, std::size_t begin, Call& call) const;
  void encode_piece(std::string_view piece, bool first, Call& call) const;
  void encode_words(std::string_view text, std::size_t pattern, Call& call) const;
  void encode_word(std::string_view word, Call& call) const;

  BpeDefinition parts_;
  AddedTokenFinder raw_, normalized_;
};

}  // namespace tranche::training
