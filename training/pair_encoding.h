#pragma once
/// Byte pair encoding (Sennrich et al., 2016) of single words.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tranche::training {

/// SentencePiece's character for a space.
inline constexpr std::string_view visible_space = "\u2581";

/// The words of tokenizer files represent bytes: printable bytes represent themselves, the others are U+0100
/// onward in order. Returns false when a character represents no byte.
bool to_bytes(std::string_view visible, std::string& bytes);

/// The byte named by "<0x0A>"; -1 for other texts.
int byte_of_name(std::string_view text);
/// The text with spaces in place of U+2581.
std::string with_spaces(std::string_view text);

/// A vocabulary and the merges of its tokens.
class PairEncoding {
 public:
  enum class Symbols : std::uint8_t {
    bytes,       ///< GPT-2's: the texts of tokens are read by to_bytes()
    characters,  ///< Llama 2's: U+2581 for a space, "<0x0A>" for the byte of a character without a token
  };
  /// Memory that encode() reuses between words.
  struct Scratch {
    struct Symbol {
      std::int32_t token = 0, before = 0, after = 0;
    };
    struct Candidate {
      std::int32_t rank = 0, place = 0, token = 0;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  explicit PairEncoding(Symbols symbols) : symbols_(symbols) { of_byte_.fill(-1); }

  /// Returns false if the number already has a token.
  bool add_token(std::string_view text, std::int32_t token);
  /// Gives a token with a literal text ("<|im_end|>") its number. Returns false if another token has it.
  bool add_special(std::string_view text, std::int32_t token);
  /// Adds a merge after all earlier ones. Returns false unless both parts and their union are tokens.
  bool add_merge(std::string_view left, std::string_view right);
  /// The first byte that cannot be encoded; -1 if there is none.
  int byte_without_token() const;

  /// The token of a text in the vocabulary's spelling; nullopt if there is none.
  std::optional<std::int32_t> token_of(std::string_view text) const;
  /// The number of tokens added by add_token().
  std::int64_t base() const noexcept { return base_; }

  std::int64_t vocabulary() const noexcept { return static_cast<std::int64_t>(bytes_.size()); }
  std::string_view bytes_of(std::int32_t token) const;
  /// Encodes a word, no part of which is merged with the next word. With `whole`, a word that is a token
  /// becomes that token, regardless of the merges.
  void encode(std::string_view word, bool whole, Scratch& scratch, std::vector<std::int32_t>& tokens) const;

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  struct Merge {
    std::int32_t rank = 0, token = 0;
  };
  void split(std::string_view word, Scratch& scratch) const;
  void push(std::int32_t place, Scratch& scratch) const;
  std::optional<std::int32_t> find(std::string_view text) const;

  Symbols symbols_;
  std::vector<std::string> bytes_;                                               ///< by token
  std::array<std::int32_t, 256> of_byte_{};                                      ///< by byte
  std::unordered_map<std::string, std::int32_t, Hash, std::equal_to<>> tokens_;  ///< by the input of encode()
  std::unordered_map<std::string, std::int32_t, Hash, std::equal_to<>>
      never_words_;  ///< tokens whose texts represent no bytes
  std::int64_t base_ = 0;
  std::unordered_map<std::uint64_t, Merge> merges_;  ///< by a pair of tokens
  std::int32_t next_rank_ = 0;
};

}  // namespace tranche::training
