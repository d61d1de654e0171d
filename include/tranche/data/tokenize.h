#pragma once
/// Files of text as one file of tokens.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tranche/data/documents.h"

namespace tranche::data {

struct TokenizeOptions {
  std::vector<std::string> inputs;  ///< .jsonl: a document a line; any other: a text file is a document
  std::string output;               ///< .safetensors, or .bin as llm.c writes it
  ChatFormat chat;
  bool special = true;  ///< see append_document()
  int threads = 1;
  std::string tokenizer_digest;  ///< what the tokenizer was made of: parts of another are not used
  std::int64_t part_bytes = std::int64_t{16} << 20;  ///< of a .jsonl file, that one thread encodes at a time
  std::function<void(std::int64_t)> progress;        ///< told from any thread how many bytes more are done
};

struct TokenizeSummary {
  std::int64_t documents = 0, tokens = 0, targets = 0;
  std::int64_t parts = 0, reused = 0;  ///< reused: found from a call that did not end
};

/// Encodes files in the order given. The output is the same for every number of threads. A safetensors file
/// has "tokens" (U16 or, beyond a vocabulary of 65,536, U32), "document_ends" (I64) and, where some tokens
/// are not learned, "targets" (U8). Finished parts lie in the folder "OUTPUT.parts" until all are done: a
/// call with the same files and options takes those that it finds. Throws ConfigurationError naming file and
/// line.
TokenizeSummary tokenize_files(const Tokenizer& tokenizer, const TokenizeOptions& options);

/// Digest of the files that load_tokenizer() reads of a folder.
std::string tokenizer_digest(const std::string& folder);

/// The names that a pattern like "data/*.jsonl" stands for, sorted; a name without *, ? and [ stands for
/// itself. Throws ConfigurationError where a pattern matches nothing.
std::vector<std::string> expand_pattern(const std::string& pattern);

}  // namespace tranche::data
