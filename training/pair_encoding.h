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

/// The words of tokenizer files stand for bytes: printable bytes for themselves, the others as U+0100 onward
/// in order. False when a character stands for no byte.
bool to_bytes(std::string_view visible, std::string& bytes);

/// The byte of "<0x0A>"; -1: another text.
int byte_of_name(std::string_view text);
/// The text with a space for each U+2581.
std::string with_spaces(std::string_view text);

/// A vocabulary and the merges of its tokens.
class PairEncoding {
 public:
  enum class Symbols : std::uint8_t {
    bytes,       ///< GPT-2's: texts of tokens as to_bytes() reads them
    characters,  ///< Llama 2's: U+2581 for a space, "<0x0A>" for the byte of a character without a token
  };
  /// Memory that encode() reuses from word to word.
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

  /// False where the number already has a token.
  bool add_token(std::string_view text, std::int32_t token);
  /// Gives a token that is written as it is ("<|im_end|>") its number. False where another token has that.
  bool add_special(std::string_view text, std::int32_t token);
  /// A merge after all that were added before. False unless both and their union are tokens.
  bool add_merge(std::string_view left, std::string_view right);
  /// The first byte that cannot be encoded; -1: none.
  int byte_without_token() const;

  /// The token of a text as the vocabulary was given it; nothing where there is none.
  std::optional<std::int32_t> token_of(std::string_view text) const;
  /// How many tokens add_token() took.
  std::int64_t base() const noexcept { return base_; }

  std::int64_t vocabulary() const noexcept { return static_cast<std::int64_t>(bytes_.size()); }
  std::string_view bytes_of(std::int32_t token) const;
  /// Encodes a word, of which no part is merged with the next. With `whole`, a word that is a token is that
  /// token, whatever the merges make of it.
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
  std::vector<std::string> bytes_;           ///< by token
  std::array<std::int32_t, 256> of_byte_{};  ///< by byte
  std::unordered_map<std::string, std::int32_t, Hash, std::equal_to<>>
      tokens_;  ///< by what encode() is given
  std::unordered_map<std::string, std::int32_t, Hash, std::equal_to<>>
      never_words_;  ///< tokens whose texts stand for no bytes
  std::int64_t base_ = 0;
  std::unordered_map<std::uint64_t, Merge> merges_;  ///< by a pair of tokens
  std::int32_t next_rank_ = 0;
};

}  // namespace tranche::training
