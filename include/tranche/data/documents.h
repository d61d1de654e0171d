#pragma once
/// Samples of JSON lines as text, and as tokens of which some are learned.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/data/tokenizer.h"

namespace tranche::data {

/// How a conversation is written as one text.
enum class ChatTemplate : std::uint8_t {
  none,
  chatml,   ///< <|im_start|>user\n...<|im_end|>\n
  llama3,   ///< Llama 3's
  mistral,  ///< Mistral 7B Instruct's: <s>[INST] ... [/INST]...</s>
  qwen,     ///< Qwen 2.5's: chatml, with its system message where a conversation has none
};
/// "chatml", "llama3", "mistral", "qwen"; throws ConfigurationError naming them.
ChatTemplate parse_chat_template(std::string_view name);

struct Segment {
  std::string text;
  bool target = true;  ///< its tokens are learned
};
struct Document {
  std::vector<Segment> segments;
  bool rendered = false;  ///< a conversation, whose text has all special tokens by name
};

/// Reads an object of one of these forms; other keys are passed over.
///     {"text": "..."}                            all of it is learned
///     {"prompt": "...", "completion": "..."}     the completion is learned
///     {"messages": [{"role": "user", "content": "..."}, ...]}
///         what the assistant says is learned, with the mark that ends it; `chat` says how it is written
/// Throws ConfigurationError, beginning with `origin`, for anything else.
Document read_json_line(std::string_view line, ChatTemplate chat, std::string_view origin);

/// Documents one after the other.
struct TokenDocuments {
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> ends;     ///< of each document: the index after its last token
  std::vector<std::uint8_t> targets;  ///< a token of 1 is learned; as many as tokens
};
/// Encodes a document as one text. A token that begins in a segment without target is not learned. With
/// `special` the tokenizer's tokens around a text are added, and the one that ends a document, unless the
/// document is `rendered`.
void append_document(const Tokenizer& tokenizer, const Document& document, bool special,
                     TokenDocuments& documents);

/// Throws ConfigurationError where a tokenizer lacks a name that the template writes.
void require_names(const Tokenizer& tokenizer, ChatTemplate chat);

}  // namespace tranche::data
