#include "tranche/data/documents.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "core/closest_match.h"
#include "core/json_node.h"
#include "tranche/core/error.h"

namespace tranche::data {

namespace {

constexpr std::array<std::string_view, 5> template_names{"none", "chatml", "llama3", "mistral", "qwen"};

/// The bytes of the blank that a text begins with, by Python's str.isspace(); 0: it begins with none.
std::size_t blank_bytes(std::string_view text) {
  utf8proc_int32_t character = -1;
  const utf8proc_ssize_t bytes = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                                  static_cast<utf8proc_ssize_t>(text.size()), &character);
  if (bytes <= 0) return 0;
  const utf8proc_property_t& property = *utf8proc_get_property(character);
  const bool blank =
      property.category == UTF8PROC_CATEGORY_ZS || property.bidi_class == UTF8PROC_BIDI_CLASS_WS ||
      property.bidi_class == UTF8PROC_BIDI_CLASS_B || property.bidi_class == UTF8PROC_BIDI_CLASS_S;
  return blank ? static_cast<std::size_t>(bytes) : 0;
}

/// The text without blanks at both ends, as the filter `trim` of templates leaves it.
std::string trimmed(std::string_view text) {
  while (const std::size_t bytes = blank_bytes(text)) text.remove_prefix(bytes);
  std::size_t end = text.size();
  for (std::size_t at = end; at > 0;) {
    do --at;
    while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
    if (blank_bytes(text.substr(at, end - at)) != end - at) break;
    end = at;
  }
  return std::string(text.substr(0, end));
}

/// Writes messages; a template is its own small function over them.
class Conversation {
 public:
  explicit Conversation(const detail::JsonNode& messages) : messages_(messages.items(1)) {}

  std::vector<Segment> write(ChatTemplate chat) {
    if (chat == ChatTemplate::none) {
      messages_.front().fail(
          "is a message of a conversation: say how it is written with a chat template, which are "
          "chatml, llama3, mistral and qwen");
    }
    for (std::size_t i = 0; i < messages_.size(); ++i) {
      for (const auto& [key, value] : messages_[i].members()) {
        if (key != "role" && key != "content" && value) {
          value.fail("is in a message, which is not supported: role and content are");
        }
      }
      const std::string role = messages_[i]["role"].choice({"system", "user", "assistant"});
      const std::string content = messages_[i]["content"].text();
      if (chat == ChatTemplate::mistral) {
        write_mistral(i, role, content);
      } else if (chat == ChatTemplate::llama3) {
        add((i == 0 ? "<|begin_of_text|>" : "") + ("<|start_header_id|>" + role) + "<|end_header_id|>\n\n",
            false);
        add(trimmed(content) + "<|eot_id|>", role == "assistant");
      } else {
        if (chat == ChatTemplate::qwen && i == 0 && role != "system") {
          add("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
              "assistant.<|im_end|>\n",
              false);
        }
        add("<|im_start|>" + role + "\n", false);
        add(content + "<|im_end|>", role == "assistant");
        add("\n", false);
      }
    }
    return std::move(segments_);
  }

 private:
  void add(const std::string& text, bool target) { segments_.push_back({text, target}); }

  void write_mistral(std::size_t index, const std::string& role, const std::string& content) {
    if (role != (index % 2 == 0 ? "user" : "assistant")) {
      messages_[index]["role"].fail(
          fmt::format("is \"{}\", but in template mistral user and assistant take turns", role));
    }
    if (index == 0) add("<s>", false);
    if (role == "user") {
      add("[INST] " + content + " [/INST]", false);
    } else {
      add(content + "</s>", true);
    }
  }

  std::vector<detail::JsonNode> messages_;
  std::vector<Segment> segments_;
};

}  // namespace

ChatTemplate parse_chat_template(std::string_view name) {
  for (std::size_t i = 1; i < template_names.size(); ++i) {
    if (template_names[i] == name) return static_cast<ChatTemplate>(i);
  }
  const std::string closest = detail::closest_match(name, {template_names.begin() + 1, template_names.end()});
  throw ConfigurationError(fmt::format("chat template '{}' is not one of chatml, llama3, mistral, qwen{}",
                                       name, closest.empty() ? "" : "; did you mean " + closest + "?"));
}

Document read_json_line(std::string_view line, ChatTemplate chat, std::string_view origin) {
  const auto root = detail::JsonNode::read<ConfigurationError>(line, origin);
  Document document;
  if (root["messages"]) {
    document.segments = Conversation(root["messages"]).write(chat);
    document.rendered = true;
  } else if (root["prompt"] || root["completion"]) {
    document.segments = {{root["prompt"].text(), false}, {root["completion"].text(), true}};
  } else if (root["text"]) {
    document.segments = {{root["text"].text(), true}};
  } else {
    root.fail("has neither \"text\", nor \"prompt\" and \"completion\", nor \"messages\"");
  }
  return document;
}

void append_document(const Tokenizer& tokenizer, const Document& document, bool special,
                     TokenDocuments& documents) {
  std::string text;
  for (const Segment& segment : document.segments) text += segment.text;
  const auto add = [&](std::int32_t token, bool target) {
    documents.tokens.push_back(token);
    documents.targets.push_back(target ? 1 : 0);
  };
  const bool around = special && !document.rendered;
  const SpecialTokens& added = tokenizer.special();
  if (around) {
    for (const std::int32_t token : added.before) add(token, document.segments.front().target);
  }
  const std::vector<std::int32_t> tokens = tokenizer.encode(text);
  const bool same = std::all_of(document.segments.begin(), document.segments.end(), [&](const Segment& each) {
    return each.target == document.segments[0].target;
  });
  if (same) {
    for (const std::int32_t token : tokens) add(token, document.segments.front().target);
  } else {
    // Segments end at places in the bytes that tokens stand for. These are not the text's own where the
    // tokenizer normalizes it or adds a space.
    std::size_t bytes = 0;
    for (const std::int32_t token : tokens) bytes += tokenizer.decode(token).size();
    std::vector<std::size_t> ends;
    std::string before;
    for (const Segment& segment : document.segments) {
      before += segment.text;
      std::size_t end = before.size();
      if (bytes != text.size()) {
        end = 0;
        for (const std::int32_t token : tokenizer.encode(before)) end += tokenizer.decode(token).size();
      }
      ends.push_back(end);
    }
    std::size_t at = 0, segment = 0;
    for (const std::int32_t token : tokens) {
      while (segment + 1 < ends.size() && at >= ends[segment]) ++segment;
      add(token, document.segments[segment].target);
      at += tokenizer.decode(token).size();
    }
  }
  if (around) {
    for (const std::int32_t token : added.after) add(token, document.segments.back().target);
    if (added.end && added.after.empty()) add(*added.end, document.segments.back().target);
  }
  if (documents.tokens.size() >
      static_cast<std::size_t>(documents.ends.empty() ? 0 : documents.ends.back())) {
    documents.ends.push_back(static_cast<std::int64_t>(documents.tokens.size()));
  }
}

void require_names(const Tokenizer& tokenizer, ChatTemplate chat) {
  static const std::array<std::vector<std::string_view>, 5> names{
      {{},
       {"<|im_start|>", "<|im_end|>"},
       {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
       {"<s>", "</s>"},
       {"<|im_start|>", "<|im_end|>"}}};
  for (const std::string_view name : names[static_cast<std::size_t>(chat)]) {
    if (!tokenizer.find(name)) {
      throw ConfigurationError(fmt::format("the tokenizer has no token '{}', which chat template {} writes",
                                           name, template_names[static_cast<std::size_t>(chat)]));
    }
  }
}

}  // namespace tranche::data
