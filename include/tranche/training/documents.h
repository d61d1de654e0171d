#pragma once
/// Samples of JSON lines as text, and as tokens of which some are learned.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/training/chat_template.h"
#include "tranche/training/tokenizer.h"

namespace tranche::training {

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
///         what the assistant says is learned, with the mark that ends it, but for messages of "weight" 0;
///         `chat` says how it is written. "tools", "documents" and "chat_template_kwargs" beside the messages
///         are given to templates of the folder's own.
/// Throws ConfigurationError, beginning with `origin`, for anything else, and where a built-in template and
/// the folder's own write another text.
Document read_json_line(std::string_view line, const ChatFormat& chat, std::string_view origin);
/// The text of such a conversation with what asks for the assistant's answer behind it; nothing where the
/// line is an object without "messages".
std::optional<std::string> read_json_prompt(std::string_view line, const ChatFormat& chat,
                                            std::string_view origin);

/// The keys of a line, an object of JSON, that neither of these reads, in their order; null values count as
/// absent. Empty where the line is no object.
std::vector<std::string> unread_keys(std::string_view line);

/// Documents one after the other.
struct TokenDocuments {
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> ends;     ///< of each document: the index after its last token
  std::vector<std::uint8_t> targets;  ///< a token of 1 is learned; as many as tokens
  std::int64_t conversations = 0;     ///< of the documents
  std::int64_t empty = 0;             ///< further documents, which have no tokens and are left out
  std::int64_t unlearned = 0;         ///< of the documents: none of their tokens is learned
  std::int64_t not_utf8 = 0;          ///< of the documents: their text has other bytes than UTF-8
};
/// Encodes a document as one text. A token that begins in a segment without target is not learned. With
/// `special` the tokenizer's tokens around a text are added, and the one that ends a document, unless the
/// document is `rendered`.
void append_document(const Tokenizer& tokenizer, const Document& document, bool special,
                     TokenDocuments& documents);

/// Throws ConfigurationError where a tokenizer lacks a name that the template writes.
void require_names(const Tokenizer& tokenizer, ChatTemplate chat);

}  // namespace tranche::training
