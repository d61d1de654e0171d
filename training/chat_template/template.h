#pragma once
/// Conversations by a template in Jinja's language.

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

  /// Fills the template from an object with "messages" and, if need be, "tools", "documents" and
  /// "chat_template_kwargs". Throws ConfigurationError: "WHERE: chat template ORIGIN, line 3: why".
  jinja::Rendering render(const nlohmann::ordered_json& conversation, bool prompt, const std::string& date,
                          std::string_view where) const;
  /// The text, with the parts that are learned: what the blocks {% generation %} wrote where the template has
  /// them. Elsewhere it is what was written in the rounds of the assistant's messages, without what the
  /// template writes in front of an answer, and without blanks behind the mark that ends
  /// it.
  std::vector<Segment> segments(const nlohmann::ordered_json& conversation, const std::string& date,
                                std::string_view where) const;

  /// Takes the place of this one where a conversation has tools.
  void set_with_tools(std::shared_ptr<const JinjaTemplate> other) { with_tools_ = std::move(other); }
  const std::string& text() const { return text_; }
  const std::string& origin() const { return origin_; }
  std::string fingerprint() const;

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

/// The first place where two texts differ, with what follows it in each: for messages.
std::string first_difference(std::string_view first, std::string_view second);

}  // namespace tranche::training
