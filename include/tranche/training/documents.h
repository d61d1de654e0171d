#pragma once
/// Samples from JSON lines as text, and as tokens of which some are learned.

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
  bool rendered = false;  ///< a conversation, whose text contains all special tokens by name
};

/// Reads an object in one of these forms; other keys are ignored.
///     {"text": "..."}                            all of it is learned
///     {"prompt": "...", "completion": "..."}     the completion is learned
///     {"messages": [{"role": "user", "content": "..."}, ...]}
///         the assistant's messages are learned, with their end marker, except those of "weight" 0;
///         `chat` is the template. "tools", "documents" and "chat_template_kwargs" beside the messages
///         are passed to templates of the folder's own.
/// Throws ConfigurationError, beginning with `origin`, for anything else, and if a built-in template and the
/// folder's own write different texts.
Document read_json_line(std::string_view line, const ChatFormat& chat, std::string_view origin);
/// The text of such a conversation, followed by the request for the assistant's answer; nullopt if the line
/// is an object without "messages".
std::optional<std::string> read_json_prompt(std::string_view line, const ChatFormat& chat,
                                            std::string_view origin);

/// The keys of a line, a JSON object, that neither function reads, in their order, and "messages[].KEY" for
/// those of messages that the folder's own template does not name; null values count as absent. Empty if the
/// line is not an object.
std::vector<std::string> unread_keys(std::string_view line, const ChatFormat& chat);

/// Documents one after the other.
struct TokenDocuments {
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> ends;     ///< of each document: the index after its last token
  std::vector<std::uint8_t> targets;  ///< 1: the token is learned; as many as tokens
  std::int64_t conversations = 0;     ///< among the documents
  std::int64_t empty = 0;             ///< further documents, which have no tokens and are left out
  std::int64_t unlearned = 0;         ///< among the documents: none of their tokens is learned
  std::int64_t not_utf8 = 0;          ///< among the documents: their text is not valid UTF-8
};
/// Encodes a document as one text. A token that begins in a segment without target is not learned. With
/// `special` the tokenizer's tokens around a text are added, and the end token, unless the document is
/// `rendered`.
void append_document(const Tokenizer& tokenizer, const Document& document, bool special,
                     TokenDocuments& documents);

/// Throws ConfigurationError if a tokenizer lacks a special token that the template writes.
void require_names(const Tokenizer& tokenizer, ChatTemplate chat);

}  // namespace tranche::training
