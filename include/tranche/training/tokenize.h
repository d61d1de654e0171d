#pragma once
/// Files of text as one file of tokens.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/training/documents.h"

namespace tranche::training {

/// The contents of files of text: one document each, or JSON lines, each line a document. automatic: their
/// bytes tell, whatever the names are.
enum class TextFormat : std::uint8_t { automatic, text, json_lines };
/// "auto", "text" or "jsonl"; throws ConfigurationError naming them and `flag`.
TextFormat parse_text_format(std::string_view name, std::string_view flag);

struct TokenizeOptions {
  std::vector<std::string> inputs;
  TextFormat format = TextFormat::automatic;  ///< of all inputs
  std::string output;                         ///< .safetensors, or .bin as llm.c writes it
  ChatFormat chat;
  bool needs_conversations =
      false;            ///< where none is in the inputs, that is an error: a template was asked for
  bool special = true;  ///< see append_document()
  int threads = 1;
  std::string tokenizer_digest;  ///< what the tokenizer was made of: parts of another are not used
  std::int64_t part_bytes = std::int64_t{16} << 20;  ///< of JSON lines, that one thread encodes at a time
  std::function<void(std::int64_t)> progress;        ///< told from any thread how many bytes more are done
  std::function<void(const std::string&)> note;      ///< told, before work begins, what a user should know
};

struct TokenizeSummary {
  std::int64_t documents = 0, tokens = 0, targets = 0;
  std::int64_t conversations = 0;          ///< of the documents
  std::int64_t texts = 0, json_lines = 0;  ///< files of each kind
  std::int64_t parts = 0, reused = 0;      ///< reused: found from a call that did not end
};

/// Encodes files in the order given. The output is the same for every number of threads. A safetensors file
/// has "tokens" (U16 or, beyond a vocabulary of 65,536, U32), "document_ends" (I64) and, where some tokens
/// are not learned, "targets" (U8). Finished parts lie in the folder "OUTPUT.parts" until all are done: a
/// call with the same files and options takes those that it finds. One process at a time works on an output,
/// and removes what others that have ended left beside it.
///
/// Throws ConfigurationError naming file and line; also for an input that changes while it is read, for files
/// that are neither text nor JSON lines, and where another process works on the output, which it names.
/// A part is held in memory: up to some 7 bytes for each byte of the largest document, or of part_bytes on
/// each thread, for tokens of one byte; fewer for longer tokens, and what the tokenizer itself takes.
TokenizeSummary tokenize_files(const Tokenizer& tokenizer, const TokenizeOptions& options);

/// Digest of the files that load_tokenizer() reads of a folder.
std::string tokenizer_digest(const std::string& folder);

/// The names that match a pattern like "data/*.jsonl", sorted; none may.
std::vector<std::string> files_of_pattern(const std::string& pattern);
/// The names that a pattern like "data/*.jsonl" stands for, sorted; a name without *, ? and [ stands for
/// itself. Throws ConfigurationError where a pattern matches nothing.
std::vector<std::string> expand_pattern(const std::string& pattern);

}  // namespace tranche::training
