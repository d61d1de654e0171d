#pragma once
/// Reads tokenizer.model together with the files beside it.

#include <memory>
#include <string_view>

#include "training/tokenizer_layout.h"
#include "tranche/training/tokenizer.h"

namespace tranche::training {

/// Reads a SentencePiece model as transformers does. Throws ConfigurationError, naming `origin` or the file
/// beside it, for contents that are not a model or not supported.
std::unique_ptr<Tokenizer> read_sentencepiece(std::string_view bytes, std::string_view origin,
                                              TokenizerLayout layout);

}  // namespace tranche::training
