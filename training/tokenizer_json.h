#pragma once
/// Reads tokenizer.json, or vocab.json with merges.txt, together with the files beside them.

#include <memory>
#include <string>

#include "training/bpe_tokenizer.h"
#include "training/tokenizer_layout.h"
#include "tranche/training/tokenizer.h"

namespace tranche::training {

/// Reads a folder's files of that kind, which must exist. Throws ConfigurationError naming file and key.
std::unique_ptr<Tokenizer> read_tokenizer_json(const TokenizerFiles& files, const std::string& folder);
std::unique_ptr<Tokenizer> read_vocabulary_and_merges(const TokenizerFiles& files, const std::string& folder);

}  // namespace tranche::training
