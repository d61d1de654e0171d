#pragma once
/// The contents of a SentencePiece model (tokenizer.model).

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::training {

/// A model as stored in its protocol buffer, with the format's defaults.
struct SentencePieceModel {
  enum class Kind : std::uint8_t {
    normal = 1,
    unknown = 2,
    control = 3,
    user_defined = 4,
    unused = 5,
    byte = 6
  };
  struct Piece {
    std::string text;
    float score = 0;
    Kind kind = Kind::normal;
  };
  std::vector<Piece> pieces;   ///< by token
  bool pair_encoding = false;  ///< BPE; else unigrams, words or characters
  bool byte_fallback = false;
  std::string unknown = "<unk>", begin = "<s>", end = "</s>";  ///< names; empty if there is no such token
  bool normalizes = false;                                     ///< by a table of characters
  bool adds_prefix = true, removes_spaces = true, escapes_spaces = true;
};

/// Reads a model. Throws ConfigurationError beginning with `origin` for other contents, with a remedy for
/// Llama 3's tiktoken list, and for pieces that are empty or occur twice.
SentencePieceModel read_sentencepiece_model(std::string_view bytes, std::string_view origin);

}  // namespace tranche::training
