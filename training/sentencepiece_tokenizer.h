#pragma once
/// tokenizer.model with what the files beside it say.

#include <memory>
#include <string_view>

#include "training/tokenizer_layout.h"
#include "tranche/training/tokenizer.h"

namespace tranche::training {

/// Reads a SentencePiece model as transformers does. Throws ConfigurationError, naming `origin` or the file
/// beside it, for what is no model and for what is not supported.
std::unique_ptr<Tokenizer> read_sentencepiece(std::string_view bytes, std::string_view origin,
                                              TokenizerLayout layout);

}  // namespace tranche::training
