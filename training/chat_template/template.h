#pragma once
/// Writes conversations with a template in Jinja's language.

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "training/chat_template/evaluator.h"
#include "tranche/training/chat_template.h"
#include "tranche/training/documents.h"

namespace tranche::training {

class JinjaTemplate {
 public:
  JinjaTemplate(std::string_view text, std::string origin, std::string_view variables);

  /// Evaluates the template with an object that has "messages" and, optionally, "tools", "documents" and
  /// "chat_template_kwargs". Throws ConfigurationError: "WHERE: chat template ORIGIN, line 3: why".
  jinja::Rendering render(const nlohmann::ordered_json& conversation, bool prompt, const std::string& date,
                          std::string_view where) const;
  /// The text with its learned parts: the output of the blocks {% generation %} if the template has them.
  /// Otherwise they are the text written in the rounds of the assistant's messages, without the text before
  /// an answer and without blanks after the end marker.
  std::vector<Segment> segments(const nlohmann::ordered_json& conversation, const std::string& date,
                                std::string_view where) const;

  /// Sets a template that replaces this one if a conversation has tools.
  void set_with_tools(std::shared_ptr<const JinjaTemplate> other) { with_tools_ = std::move(other); }
  const std::string& text() const { return text_; }
  const std::string& origin() const { return origin_; }
  std::string fingerprint() const;
  /// True if the template that writes this conversation names a key of messages: m.key or m["key"].
  bool names(std::string_view key, const nlohmann::ordered_json& conversation) const;

 private:
  const JinjaTemplate& for_tools(const nlohmann::ordered_json& conversation) const;
  std::vector<Segment> own_segments(const nlohmann::ordered_json& conversation, const std::string& date,
                                    std::string_view where) const;
  std::string header_of(const nlohmann::ordered_json& conversation, const std::string& date,
                        std::string_view where) const;
  [[noreturn]] void fail_untold(const char* why, std::string_view where) const;
  std::string text_, origin_, variables_text_;
  std::vector<std::pair<std::string, jinja::Value>> variables_;
  jinja::Block block_;
  bool marks_ = false;  ///< has blocks {% generation %}
  std::shared_ptr<const JinjaTemplate> with_tools_;
};

/// The first position at which two texts differ, with the following text of each: for messages.
std::string first_difference(std::string_view first, std::string_view second);

}  // namespace tranche::training
