#include "tranche/training/documents.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/closest_match.h"
#include "core/json_node.h"
#include "training/chat_template/template.h"
#include "training/chat_template/text.h"
#include "training/word_pattern.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

constexpr std::array<std::string_view, 5> template_names{"none", "chatml", "llama3", "mistral", "qwen"};

/// ShareGPT's form of conversations, which is not read.
constexpr const char* share_gpt =
    "ShareGPT's conversations are read once \"conversations\" is renamed \"messages\", \"from\" is "
    "\"role\" (and its \"human\" is \"user\", its \"gpt\" \"assistant\"), and \"value\" is \"content\"";

void require_role(const detail::JsonNode& message) {
  if (!message["role"] && message["from"]) message.fail(fmt::format("has no \"role\": {}", share_gpt));
}

/// Keys with such a value exist because a table has a column of that name.
bool asks_for_nothing(const detail::JsonNode& value) {
  return !value || ((value.json().is_array() || value.json().is_object()) && value.json().empty());
}

/// Writes messages; each built-in template is a small function that uses it.
class Conversation {
 public:
  explicit Conversation(const detail::JsonNode& messages) : messages_(messages.items(1)) {}

  std::vector<Segment> write(ChatTemplate chat) {
    for (std::size_t i = 0; i < messages_.size(); ++i) {
      require_role(messages_[i]);
      for (const auto& [key, value] : messages_[i].members()) {
        if (key == "role" || key == "content" || key == "name" || asks_for_nothing(value)) continue;
        if (key == "weight") {
          (void)value.integer(0, 1);
          continue;
        }
        value.fail(
            fmt::format("is in a message, which chat template {} does not write: it writes role and content, "
                        "and a template of the tokenizer's folder may write more (--chat-template own)",
                        template_names[static_cast<std::size_t>(chat)]));
      }
      const std::string role = messages_[i]["role"].choice({"system", "user", "assistant"});
      const std::string content = messages_[i]["content"].text();
      const bool learned = role == "assistant" && messages_[i]["weight"].integer_or(1) != 0;
      if (chat == ChatTemplate::mistral) {
        write_mistral(i, role, content, learned);
      } else if (chat == ChatTemplate::llama3) {
        add((i == 0 ? "<|begin_of_text|>" : "") + ("<|start_header_id|>" + role) + "<|end_header_id|>\n\n",
            false);
        add(std::string(without_blanks(content)) + "<|eot_id|>", learned);
      } else {
        if (chat == ChatTemplate::qwen && i == 0 && role != "system") {
          add("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
              "assistant.<|im_end|>\n",
              false);
        }
        add("<|im_start|>" + role + "\n", false);
        add(content + "<|im_end|>", learned);
        add("\n", false);
      }
    }
    return std::move(segments_);
  }

 private:
  void add(const std::string& text, bool target) { segments_.push_back({text, target}); }

  void write_mistral(std::size_t index, const std::string& role, const std::string& content, bool learned) {
    if (role != (index % 2 == 0 ? "user" : "assistant")) {
      messages_[index]["role"].fail(
          fmt::format("is \"{}\", but in template mistral user and assistant take turns", role));
    }
    if (index == 0) add("<s>", false);
    if (role == "user") {
      add("[INST] " + content + " [/INST]", false);
    } else {
      add(content + "</s>", learned);
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
  throw ConfigurationError(
      fmt::format("chat template '{}' is neither chatml, llama3, mistral, qwen nor own, nor a file that "
                  "ends in .jinja{}",
                  name, closest.empty() ? "" : "; did you mean " + closest + "?"));
}

namespace {

/// The text that a built-in template writes before an answer.
std::string answer_header(ChatTemplate chat) {
  return chat == ChatTemplate::mistral  ? ""
         : chat == ChatTemplate::llama3 ? "<|start_header_id|>assistant<|end_header_id|>\n\n"
                                        : "<|im_start|>assistant\n";
}

std::string text_of(const std::vector<Segment>& segments) {
  std::string text;
  for (const Segment& segment : segments) text += segment.text;
  return text;
}

/// Refuses a conversation for which the folder's own template writes a different text.
void require_same(const std::string& text, const std::string& own, const ChatFormat& chat,
                  std::string_view origin) {
  if (text == own) return;
  throw ConfigurationError(
      fmt::format("{}: chat template {} writes another text than the template of the tokenizer's folder "
                  "({}), which the model was made with: {}; --chat-template own uses the folder's template, "
                  "--chat-template FILE.jinja uses one of your own, whatever the folder has",
                  origin, template_names[static_cast<std::size_t>(chat.built_in)], chat.own->origin(),
                  first_difference(text, own)));
}

bool is_fixed(std::string_view key) {
  return key == "role" || key == "content" || key == "weight";
}

/// Refuses a message of which the template would write an empty turn, or leave out a call.
void require_written(const detail::JsonNode& message, const nlohmann::ordered_json& conversation,
                     const JinjaTemplate& own) {
  // A template that does not name "content" writes messages as a whole, or not at all.
  if (!own.names("content", conversation)) return;
  bool written = !asks_for_nothing(message["content"]);
  std::string keys;
  for (const auto& [key, value] : message.members()) {
    if (is_fixed(key) || asks_for_nothing(value)) continue;
    const bool named = own.names(key, conversation);
    if (!named && (key == "tool_calls" || key == "function_call"))
      value.fail(fmt::format("is in a message, but chat template {} does not write it", own.origin()));
    // Calls are lists or objects; a text such as the "text" of a part of the content is named elsewhere.
    const bool thought = key.starts_with("reasoning") || key == "thinking";
    written = written || (named && (thought || value.json().is_structured()));
    keys += fmt::format("{}\"{}\"", keys.empty() ? "" : ", ", key);
  }
  if (written) return;
  message["content"].fail(fmt::format(
      "is {}: the message has no text{}",
      message.json().contains("content") ? message["content"].json().dump() : "missing",
      keys.empty()
          ? ""
          : fmt::format("; beside its role it has {}: give the key that holds the text the name \"content\"",
                        keys)));
}

/// The conversation in the form that a template receives.
const nlohmann::ordered_json& checked(const detail::JsonNode& root, const JinjaTemplate& own) {
  for (const detail::JsonNode& message : root["messages"].items(1)) {
    require_role(message);
    (void)message["role"].name();
    if (message["weight"]) (void)message["weight"].integer(0, 1);
    require_written(message, root.json(), own);
  }
  if (root["chat_template_kwargs"]) (void)root["chat_template_kwargs"].object();
  for (const char* key : {"tools", "documents"}) {
    if (root[key]) (void)root[key].items();
  }
  return root.json();
}

void require_template(const detail::JsonNode& root, const ChatFormat& chat) {
  if (chat.built_in != ChatTemplate::none || chat.own) return;
  if (!chat.refused.empty()) throw ConfigurationError(chat.refused);
  root["messages"].items(1).front().fail(
      "is a message of a conversation: say how it is written with --chat-template, which is chatml, llama3, "
      "mistral, qwen, own for the template of the tokenizer's folder, or a file that ends in .jinja");
}

/// Refuses keys beside the messages that a built-in template would not write.
void require_messages_alone(const detail::JsonNode& root, const ChatFormat& chat) {
  for (const char* key : {"tools", "documents", "chat_template_kwargs"}) {
    if (asks_for_nothing(root[key])) continue;
    root[key].fail(
        fmt::format("stands beside messages, which chat template {} does not write; a template of the "
                    "tokenizer's folder may (--chat-template own)",
                    template_names[static_cast<std::size_t>(chat.built_in)]));
  }
}

std::vector<Segment> conversation_of(const detail::JsonNode& root, const ChatFormat& chat,
                                     std::string_view origin) {
  require_template(root, chat);
  if (chat.built_in == ChatTemplate::none)
    return chat.own->segments(checked(root, *chat.own), chat.date, origin);
  require_messages_alone(root, chat);
  std::vector<Segment> segments = Conversation(root["messages"]).write(chat.built_in);
  if (chat.own) {
    require_same(text_of(segments), chat.own->render(checked(root, *chat.own), false, chat.date, origin).text,
                 chat, origin);
  }
  return segments;
}

}  // namespace

Document read_json_line(std::string_view line, const ChatFormat& chat, std::string_view origin) {
  const auto root = detail::JsonNode::read<ConfigurationError>(line, origin);
  Document document;
  if (root["messages"]) {
    document.segments = conversation_of(root, chat, origin);
    document.rendered = true;
  } else if (root["text"]) {
    // In some data sets a column named prompt describes how the text was made.
    if (root["completion"]) root.fail("has both \"text\" and \"completion\": which of them is the document?");
    document.segments = {{root["text"].text(), true}};
  } else if (root["completion"] || root["prompt"]) {
    for (const char* key : {"prompt", "completion"}) {
      if (!root[key])
        root.fail(fmt::format("has \"{}\" without \"{}\"", key[0] == 'p' ? "completion" : "prompt", key));
    }
    document.segments = {{root["prompt"].text(), false}, {root["completion"].text(), true}};
  } else {
    for (const auto& [key, value] : root.members()) {
      if (key == "text" || key == "messages" || key == "prompt" || key == "completion")
        root.fail(fmt::format("has no text: its \"{}\" is null", key));
    }
    if (root["conversations"]) root["conversations"].fail(fmt::format("is not read: {}", share_gpt));
    root.fail("has neither \"text\", nor \"prompt\" and \"completion\", nor \"messages\"");
  }
  return document;
}

std::vector<std::string> unread_keys(std::string_view line, const ChatFormat& chat) {
  const auto json = nlohmann::ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return {};
  const auto has = [&](const char* key) { return json.contains(key) && !json[key].is_null(); };
  const std::vector<std::string_view> read =
      has("messages")
          ? std::vector<std::string_view>{"messages", "tools", "documents", "chat_template_kwargs"}
      : has("text") ? std::vector<std::string_view>{"text"}
                    : std::vector<std::string_view>{"prompt", "completion"};
  std::vector<std::string> keys;
  for (const auto& [key, value] : json.items()) {
    if (!value.is_null() && std::find(read.begin(), read.end(), key) == read.end()) keys.push_back(key);
  }
  if (!has("messages") || !json["messages"].is_array() || !chat.own || chat.built_in != ChatTemplate::none ||
      !chat.own->names("content", json))
    return keys;
  for (const auto& message : json["messages"]) {
    if (!message.is_object()) continue;
    for (const auto& [key, value] : message.items()) {
      std::string name = fmt::format("messages[].{}", key);
      if (is_fixed(key) || value.is_null() || chat.own->names(key, json)) continue;
      if (std::find(keys.begin(), keys.end(), name) == keys.end()) keys.push_back(std::move(name));
    }
  }
  return keys;
}

std::optional<std::string> read_json_prompt(std::string_view line, const ChatFormat& chat,
                                            std::string_view origin) {
  const auto root = detail::JsonNode::read<ConfigurationError>(line, origin);
  if (!root.json().is_object() || !root["messages"]) return std::nullopt;
  require_template(root, chat);
  if (chat.built_in == ChatTemplate::none)
    return chat.own->render(checked(root, *chat.own), true, chat.date, origin).text;
  require_messages_alone(root, chat);
  std::string text =
      text_of(Conversation(root["messages"]).write(chat.built_in)) + answer_header(chat.built_in);
  if (chat.own)
    require_same(text, chat.own->render(checked(root, *chat.own), true, chat.date, origin).text, chat,
                 origin);
  return text;
}

void append_document(const Tokenizer& tokenizer, const Document& document, bool special,
                     TokenDocuments& documents) {
  const auto add = [&](std::int32_t token, bool target) {
    documents.tokens.push_back(token);
    documents.targets.push_back(target ? 1 : 0);
  };
  const std::size_t begin = documents.tokens.size();
  const bool around = special && !document.rendered;
  const SpecialTokens& added = tokenizer.special();
  if (around) {
    for (const std::int32_t token : added.before) add(token, document.segments.front().target);
  }
  const bool one = document.segments.size() == 1;  // a single segment is not copied, because it may be as
                                                   // large as memory
  const std::string joined = one ? std::string() : text_of(document.segments);
  const std::string& text = one ? document.segments.front().text : joined;
  const bool same = std::all_of(document.segments.begin(), document.segments.end(), [&](const Segment& each) {
    return each.target == document.segments[0].target;
  });
  std::vector<std::size_t> begins;
  std::vector<std::int32_t> tokens = same ? tokenizer.encode(text) : tokenizer.encode(text, begins);
  if (tokens.size() > begin) {  // allocates once, including the tokens around
    const std::size_t all = begin + tokens.size() + added.before.size() + added.after.size() + 1;
    documents.targets.reserve(all);
    if (!documents.tokens.empty()) documents.tokens.reserve(all);
  }
  if (same) {
    documents.targets.insert(documents.targets.end(), tokens.size(),
                             document.segments.front().target ? 1 : 0);
  } else {
    std::size_t segment = 0, end = document.segments[0].text.size();
    for (const std::size_t token_begin : begins) {
      while (segment + 1 < document.segments.size() && token_begin >= end) {
        end += document.segments[++segment].text.size();
      }
      documents.targets.push_back(document.segments[segment].target ? 1 : 0);
    }
  }
  if (documents.tokens.empty()) {
    documents.tokens = std::move(tokens);
  } else {
    documents.tokens.insert(documents.tokens.end(), tokens.begin(), tokens.end());
  }
  if (around) {
    for (const std::int32_t token : added.after) add(token, document.segments.back().target);
    if (added.end && added.after.empty()) add(*added.end, document.segments.back().target);
  }
  if (document.rendered) ++documents.conversations;
  if (documents.tokens.size() > begin) {
    documents.ends.push_back(static_cast<std::int64_t>(documents.tokens.size()));
    const auto own = documents.targets.begin() + static_cast<std::ptrdiff_t>(begin);
    documents.unlearned += std::find(own, documents.targets.end(), 1) == documents.targets.end() ? 1 : 0;
    documents.not_utf8 += utf8_prefix(text) == text.size() ? 0 : 1;
  } else {
    ++documents.empty;
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

}  // namespace tranche::training
