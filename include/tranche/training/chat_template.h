#pragma once
/// How conversations are written as text.

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
  qwen,     ///< Qwen 2.5's: chatml, with its system message where a conversation has none
};
/// "chatml", "llama3", "mistral", "qwen"; throws ConfigurationError naming them.
ChatTemplate parse_chat_template(std::string_view name);

/// A template in Jinja's language, as tokenizers' folders have it. May be used by several threads at once.
class JinjaTemplate;
/// Reads a template. `origin` is named in errors. `variables` is a JSON object of what templates know beside
/// the messages, such as {"bos_token": "<s>"}. Throws ConfigurationError with the line for what is no Jinja
/// and for what is not supported.
std::shared_ptr<const JinjaTemplate> read_jinja_template(std::string_view text, const std::string& origin,
                                                         std::string_view variables = "{}");
/// True when a tokenizer's folder has a template: chat_template.jinja, or "chat_template" of
/// tokenizer_config.json.
bool has_jinja_template(const std::string& folder);
/// Reads that, or `file` in its place, with the special tokens of the folder as variables. An empty folder
/// has none.
std::shared_ptr<const JinjaTemplate> load_jinja_template(const std::string& folder,
                                                         const std::string& file = "");

struct ChatFormat {
  ChatFormat() = default;
  ChatFormat(ChatTemplate name) : built_in(name) {}  // NOLINT(google-explicit-constructor)

  ChatTemplate built_in = ChatTemplate::none;
  /// Alone it writes the conversations. Beside `built_in` it has to write the same text.
  std::shared_ptr<const JinjaTemplate> own;
  std::string date;  ///< that templates take as today's: "2026-11-27"; empty: templates that ask are refused
  std::string refused;  ///< not empty: why conversations cannot be written, where there is one
};
/// The format of a flag: the name of a built-in template, "own" for that of the tokenizer's folder, a file
/// that ends in .jinja, or "" for the folder's where it has one. A built-in one is held to the folder's.
/// Throws ConfigurationError for a date that is none, and for a template that is not there or cannot be read;
/// with "" that is put off until a conversation is there.
ChatFormat chat_format(const std::string& name, const std::string& folder, const std::string& date);
/// Everything that texts depend on beside the messages, for comparison.
std::string fingerprint(const ChatFormat& format);

}  // namespace tranche::training
