#pragma once
/// Encodes text files into one file of tokens.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/training/documents.h"

namespace tranche::training {

/// The contents of text files: one document each, or JSON lines with a document per line. automatic: detected
/// by their bytes, whatever their names.
enum class TextFormat : std::uint8_t { automatic, text, json_lines };
/// "auto", "text" or "jsonl"; throws ConfigurationError naming them and `flag`.
TextFormat parse_text_format(std::string_view name, std::string_view flag);

struct TokenizeOptions {
  std::vector<std::string> inputs;
  TextFormat format = TextFormat::automatic;  ///< of all inputs
  std::string output;                         ///< .safetensors, or .bin as llm.c writes it
  ChatFormat chat;
  bool needs_conversations =
      false;            ///< if the inputs contain none, that is an error, because a template was requested
  bool special = true;  ///< see append_document()
  int threads = 1;
  std::string tokenizer_digest;  ///< identifies the tokenizer's files: parts from another one are not used
  std::int64_t part_bytes = std::int64_t{16} << 20;  ///< of JSON lines, which one thread encodes at a time
  std::function<void(std::int64_t)> progress;        ///< called with the bytes done, from any thread
  std::function<void(const std::string&)> note;      ///< called with facts for the user, before work begins
};

struct TokenizeSummary {
  std::int64_t documents = 0, tokens = 0, targets = 0;
  std::int64_t conversations = 0;          ///< among the documents
  std::int64_t texts = 0, json_lines = 0;  ///< files of each kind
  std::int64_t parts = 0, reused = 0;      ///< reused: left by an earlier, interrupted call
};

/// Encodes files in the given order. The output is the same for every number of threads. A safetensors file
/// has "tokens" (U16 or, beyond a vocabulary of 65,536, U32), "document_ends" (I64) and, if some tokens are
/// not learned, "targets" (U8). Finished parts are stored in the folder "OUTPUT.parts" until all are done: a
/// call with the same files and options reuses those that it finds. Only one process at a time works on an
/// output; it removes leftovers of ended processes.
///
/// Throws ConfigurationError naming file and line; also for an input that changes while it is read, for files
/// that are neither text nor JSON lines, and if another process, which it names, works on the output. A part
/// is held in memory: up to some 7 bytes for each byte of the largest document, or of part_bytes on each
/// thread, for tokens of one byte; less for longer tokens, plus the tokenizer's own memory.
TokenizeSummary tokenize_files(const Tokenizer& tokenizer, const TokenizeOptions& options);

/// The digest of the files that load_tokenizer() reads in a folder.
std::string tokenizer_digest(const std::string& folder);

/// The names that match a pattern like "data/*.jsonl", sorted; possibly none.
std::vector<std::string> files_of_pattern(const std::string& pattern);
/// The names that a pattern like "data/*.jsonl" matches, sorted; a name without *, ? and [ is returned
/// unchanged. Throws ConfigurationError if a pattern matches nothing.
std::vector<std::string> expand_pattern(const std::string& pattern);

}  // namespace tranche::training
