#pragma once
/// tokenizer.json, and vocab.json with merges.txt, with what the files beside them say.

#include <memory>
#include <string>

#include "training/bpe_tokenizer.h"
#include "training/tokenizer_layout.h"
#include "tranche/training/tokenizer.h"

namespace tranche::training {

/// Reads a folder's files of that kind, which are there. Throws ConfigurationError naming file and key.
std::unique_ptr<Tokenizer> read_tokenizer_json(const TokenizerFiles& files, const std::string& folder);
std::unique_ptr<Tokenizer> read_vocabulary_and_merges(const TokenizerFiles& files, const std::string& folder);

}  // namespace tranche::training
