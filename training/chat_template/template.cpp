#include "training/chat_template/template.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <nlohmann/json.hpp>

#include "core/printable.h"
#include "training/chat_template/text.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void fail(const std::string& origin, const jinja::Refusal& refusal, std::string_view where) {
  throw ConfigurationError(fmt::format("{}{}chat template {}{}: {}", where, where.empty() ? "" : ": ", origin,
                                       refusal.line > 0 ? fmt::format(", line {}", refusal.line) : "",
                                       detail::printable(refusal.what)));
}

bool has_marks(const jinja::Block& block) {
  return std::any_of(block.begin(), block.end(), [](const jinja::Statement& statement) {
    return statement.kind == jinja::Statement::Kind::generation ||
           std::any_of(statement.blocks.begin(), statement.blocks.end(), has_marks);
  });
}

/// The names of an assistant's reasoning.
constexpr std::array<std::string_view, 3> thoughts{"reasoning_content", "thinking", "reasoning"};

/// The message in the form that transformers gives to templates: without null keys, and with an assistant's
/// reasoning under each name that templates use.
Json as_template_sees(const Json& message) {
  Json seen = Json::object();
  const Json* thought = nullptr;
  for (const std::string_view key : thoughts) {
    const auto found = message.find(key);
    if (found == message.end() || found->is_null()) continue;
    thought = &*found;
    break;
  }
  if (thought != nullptr) seen["thinking"] = *thought;
  for (const auto& [key, value] : message.items()) {
    if (!value.is_null()) seen[key] = value;
  }
  if (thought != nullptr) seen["reasoning_content"] = *thought;
  return seen;
}

const Json* member(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

bool is_assistant(const Json& message) {
  const Json* role = member(message, "role");
  return role != nullptr && role->is_string() && *role == "assistant";
}

/// The end of the learned part of a turn, which begins after `header` bytes. Blanks after an end marker are
/// excluded. If the turn ends with its content, they are included, because nothing else ends it.
std::size_t end_of_turn(std::string_view turn, std::size_t header, const Json& message) {
  const std::size_t end = without_blanks(turn, false, true).size();
  const Json* content = member(message, "content");
  if (content == nullptr || !content->is_string() || end <= header) return end;
  const std::string_view said = without_blanks(content->get_ref<const std::string&>());
  const std::string_view answer = without_blanks(turn.substr(header, end - header));
  // The content may itself be the marker; then there are two.
  const bool marked = answer != said && (answer.starts_with(said) || !answer.ends_with(said));
  return marked ? end : turn.size();
}

}  // namespace

JinjaTemplate::JinjaTemplate(std::string_view text, std::string origin, std::string_view variables)
    : text_(text), origin_(std::move(origin)), variables_text_(variables) {
  try {
    const Json given = Json::parse(variables);
    for (const auto& [name, value] : given.items()) variables_.emplace_back(name, jinja::Value::of(value));
    block_ = jinja::parse(text_);
    marks_ = has_marks(block_);
  } catch (const jinja::Refusal& refusal) {
    fail(origin_, refusal, "");
  }
}

std::string JinjaTemplate::fingerprint() const {
  return text_ + '\0' + variables_text_ + (with_tools_ ? '\0' + with_tools_->fingerprint() : "");
}

const JinjaTemplate& JinjaTemplate::for_tools(const Json& conversation) const {
  const Json* tools = member(conversation, "tools");
  return tools != nullptr && !tools->empty() && with_tools_ ? *with_tools_ : *this;
}

bool JinjaTemplate::names(std::string_view key, const Json& conversation) const {
  const std::string& text = for_tools(conversation).text_;
  const auto is_there = [&](std::string_view name) {
    for (std::size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
      const std::size_t end = at + name.size();
      const bool whole = end == text.size() ||
                         (std::isalnum(static_cast<unsigned char>(text[end])) == 0 && text[end] != '_');
      if (whole && at > 0 && std::string_view(".'\"").find(text[at - 1]) != std::string_view::npos)
        return true;
    }
    return false;
  };
  const bool is_thought = std::find(thoughts.begin(), thoughts.end(), key) != thoughts.end();
  return is_there(key) || (is_thought && std::any_of(thoughts.begin(), thoughts.end(), is_there));
}

jinja::Rendering JinjaTemplate::render(const Json& conversation, bool prompt, const std::string& date,
                                       std::string_view where) const {
  if (const JinjaTemplate& other = for_tools(conversation); &other != this)
    return other.render(conversation, prompt, date, where);
  try {
    jinja::Variables variables;
    variables.date = date;
    variables.values = variables_;
    const auto set = [&](const std::string& name, jinja::Value value) {
      std::erase_if(variables.values, [&](const auto& each) { return each.first == name; });
      variables.values.emplace_back(name, std::move(value));
    };
    variables.bytes = variables_text_.size();
    if (const Json* more = member(conversation, "chat_template_kwargs")) {
      variables.bytes += more->dump().size();
      for (const auto& [name, value] : more->items()) set(name, jinja::Value::of(value));
    }
    Json messages = Json::array();
    for (const Json& message : conversation.at("messages")) messages.push_back(as_template_sees(message));
    variables.bytes += messages.dump().size();
    set("messages", jinja::Value::of(messages));
    for (const char* name : {"tools", "documents"}) {
      const Json* given = member(conversation, name);
      const bool there = given != nullptr && !given->empty();
      if (there && text_.find(name) == std::string::npos)
        jinja::refuse(fmt::format("does not write the '{}' of the conversation", name));
      variables.bytes += there ? given->dump().size() : 0;
      set(name, there ? jinja::Value::of(*given) : jinja::Value());
    }
    set("add_generation_prompt", jinja::Value::boolean(prompt));
    return jinja::render(block_, text_.size(), variables);
  } catch (const jinja::Refusal& refusal) {
    fail(origin_, refusal, where);
  }
}

std::vector<Segment> JinjaTemplate::segments(const Json& conversation, const std::string& date,
                                             std::string_view where) const {
  return for_tools(conversation).own_segments(conversation, date, where);
}

void JinjaTemplate::fail_untold(const char* why, std::string_view where) const {
  fail(origin_,
       {fmt::format("{}, so which tokens are learned is not known; mark them with {{% generation %}} in a "
                    "template of your own",
                    why),
        0},
       where);
}

/// The text that the template writes before an answer. A template reveals it when it is asked for an answer:
/// before the last one, or after the conversation if nothing precedes that. If a template cannot be asked, it
/// is the common beginning of two answers with different contents.
std::string JinjaTemplate::header_of(const Json& conversation, const std::string& date,
                                     std::string_view where) const {
  Json before = conversation;
  Json& messages = before["messages"];
  std::size_t last = messages.size();
  while (last > 0 && !is_assistant(messages[last - 1])) --last;
  Json upto(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(last));
  if (last > 1) messages = Json(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(last - 1));
  const std::string without = render(before, false, date, where).text;
  std::string header = render(before, true, date, where).text;
  if (!header.starts_with(without))
    fail_untold("rewrites the conversation where it asks for an answer", where);
  header.erase(0, without.size());
  if (!header.empty()) return header;

  std::array<std::string, 2> turns;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    upto.back() = {{"role", "assistant"}, {"content", i == 0 ? "0" : "1"}};
    before["messages"] = upto;
    const jinja::Rendering rendering = render(before, false, date, where);
    for (const auto& [message, range] : rendering.turns) {
      if (message + 1 == last) turns[i] = rendering.text.substr(range.begin, range.end - range.begin);
    }
  }
  const auto differs =
      std::mismatch(turns[0].begin(), turns[0].end(), turns[1].begin(), turns[1].end()).first;
  header = turns[0].substr(0, static_cast<std::size_t>(differs - turns[0].begin()));
  // A blank before an answer belongs to its first token.
  return without_blanks(header).empty() ? "" : header;
}

std::vector<Segment> JinjaTemplate::own_segments(const Json& conversation, const std::string& date,
                                                 std::string_view where) const {
  const Json& messages = conversation.at("messages");
  const jinja::Rendering rendering = render(conversation, false, date, where);
  const auto untold = [&](const char* why) { fail_untold(why, where); };
  const auto turn_at = [&](std::size_t at) {
    return std::find_if(rendering.turns.begin(), rendering.turns.end(), [&](const jinja::Turn& turn) {
      return turn.range.begin <= at && at < turn.range.end;
    });
  };
  const auto is_learned = [&](std::size_t message) {
    const Json* weight = member(messages[message], "weight");
    return is_assistant(messages[message]) && (weight == nullptr || *weight != 0);
  };

  std::vector<jinja::Range> learned;
  if (rendering.lost_marks) untold("marks what the assistant says inside of a macro or of a {% set %} block");
  if (marks_) {
    for (const jinja::Range& range : rendering.generated) {
      const auto turn = turn_at(range.begin);
      if (turn == rendering.turns.end() || is_learned(turn->message)) learned.push_back(range);
    }
  } else if (std::any_of(messages.begin(), messages.end(), is_assistant)) {
    const std::string header = header_of(conversation, date, where);
    std::vector<bool> seen(messages.size(), false);
    for (const auto& [message, range] : rendering.turns) {
      if (!is_assistant(messages[message])) continue;
      if (seen[message]) untold("writes a message of the assistant in two places");
      seen[message] = true;
      std::string_view turn = std::string_view(rendering.text).substr(range.begin, range.end - range.begin);
      // The first round of a loop may also write the beginning of the whole text.
      const std::size_t place = message == 0 ? turn.find(header) : 0;
      const std::size_t begin = range.begin + (place == std::string_view::npos ? 0 : place);
      turn.remove_prefix(begin - range.begin);
      const auto [differs, other] = std::mismatch(header.begin(), header.end(), turn.begin(), turn.end());
      std::string_view common = turn.substr(0, static_cast<std::size_t>(differs - header.begin()));
      // The request may contain lines about reasoning that earlier answers do not have.
      if (differs != header.end()) common = common.substr(0, common.rfind('\n') + 1);
      if (differs != header.end() && common.empty())
        untold("begins an assistant message differently from the answer that it asks for");
      const std::size_t end = end_of_turn(turn, common.size(), messages[message]);
      if (is_learned(message) && end > common.size()) learned.push_back({begin + common.size(), begin + end});
    }
    for (std::size_t i = 0; i < seen.size(); ++i) {
      const Json* content = member(messages[i], "content");
      const bool says =
          content != nullptr && content->is_string() && !content->get_ref<const std::string&>().empty();
      if (is_assistant(messages[i]) && !seen[i] && says)
        untold("writes the assistant's messages outside of a loop over them");
    }
  }

  std::vector<Segment> segments;
  std::size_t at = 0;
  const auto add = [&](std::size_t end, bool target) {
    if (end > at) segments.push_back({rendering.text.substr(at, end - at), target});
    at = std::max(at, end);
  };
  for (const jinja::Range& range : learned) {
    add(range.begin, false);
    add(range.end, true);
  }
  add(rendering.text.size(), false);
  if (segments.empty()) segments.push_back({"", false});
  return segments;
}

std::string first_difference(std::string_view first, std::string_view second) {
  const auto [a, b] = std::mismatch(first.begin(), first.end(), second.begin(), second.end());
  auto at = static_cast<std::size_t>(a - first.begin());
  while (at > 0 && at < first.size() && (static_cast<unsigned char>(first[at]) & 0xC0) == 0x80) --at;
  const auto part = [&](std::string_view text) {
    std::string_view rest = text.substr(std::min(at, text.size()));
    std::size_t end = std::min<std::size_t>(40, rest.size());
    while (end < rest.size() && (static_cast<unsigned char>(rest[end]) & 0xC0) == 0x80) ++end;
    return rest.empty() ? std::string("its end")
                        : detail::printable(jinja::python_quoted(rest.substr(0, end)));
  };
  return fmt::format("after {} equal bytes, {} stands in place of {}", at, part(first), part(second));
}

}  // namespace tranche::training
