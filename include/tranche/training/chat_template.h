#pragma once
/// Templates that write conversations as text.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace tranche::training {

enum class ChatTemplate : std::uint8_t {
  none,
  chatml,   ///< <|im_start|>user\n...<|im_end|>\n
  llama3,   ///< Llama 3's
  mistral,  ///< Mistral 7B Instruct's: <s>[INST] ... [/INST]...</s>
  qwen,     ///< Qwen 2.5's: chatml, with a default system message
};
/// "chatml", "llama3", "mistral", "qwen"; throws ConfigurationError naming them.
ChatTemplate parse_chat_template(std::string_view name);

/// A template in Jinja's language, in the form of tokenizers' folders. Several threads may use it at once.
class JinjaTemplate;
/// Reads a template. `origin` is named in errors. `variables` is a JSON object of the variables beside the
/// messages, such as {"bos_token": "<s>"}. Throws ConfigurationError with the line for text that is not
/// Jinja, and for unsupported features.
std::shared_ptr<const JinjaTemplate> read_jinja_template(std::string_view text, const std::string& origin,
                                                         std::string_view variables = "{}");
/// True when a tokenizer's folder has a template: chat_template.jinja, or "chat_template" of
/// tokenizer_config.json.
bool has_jinja_template(const std::string& folder);
/// Reads that template, or `file` instead, with the special tokens of the folder as variables. An empty
/// folder name means that there are none.
std::shared_ptr<const JinjaTemplate> load_jinja_template(const std::string& folder,
                                                         const std::string& file = "");

struct ChatFormat {
  ChatFormat() = default;
  ChatFormat(ChatTemplate name) : built_in(name) {}  // NOLINT(google-explicit-constructor)

  ChatTemplate built_in = ChatTemplate::none;
  /// If there is no `built_in`, it writes the conversations. Otherwise it must write the same text.
  std::shared_ptr<const JinjaTemplate> own;
  std::string date;     ///< today's date in templates: "2026-11-27"; empty: templates that use it are refused
  std::string refused;  ///< not empty: why conversations cannot be written
};
/// The format for a flag: the name of a built-in template, "own" for the one in the tokenizer's folder, a
/// file that ends in .jinja, or "" for the folder's if it has one. A built-in one is compared with the
/// folder's. Throws ConfigurationError for an invalid date, and for a template that is missing or cannot be
/// read; with "" that error is postponed until there is a conversation.
ChatFormat chat_format(const std::string& name, const std::string& folder, const std::string& date);
/// Everything beside the messages that determines the text, for comparison.
std::string fingerprint(const ChatFormat& format);

}  // namespace tranche::training
