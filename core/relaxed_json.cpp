#include "core/relaxed_json.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <optional>

#include "core/json.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

bool is_digit(char c) {
  return std::isdigit(static_cast<unsigned char>(c)) != 0;
}

/// True for a number in JSON's own grammar: no leading zeros, no bare point, no plus.
bool is_number(std::string_view word) {
  std::size_t at = 0;
  const auto digits = [&] {
    const std::size_t begin = at;
    while (at < word.size() && is_digit(word[at])) ++at;
    return at - begin;
  };
  if (at < word.size() && word[at] == '-') ++at;
  const std::size_t first = at, whole = digits();
  if (whole == 0 || (whole > 1 && word[first] == '0')) return false;
  if (at < word.size() && word[at] == '.') {
    ++at;
    if (digits() == 0) return false;
  }
  if (at < word.size() && (word[at] == 'e' || word[at] == 'E')) {
    ++at;
    if (at < word.size() && (word[at] == '+' || word[at] == '-')) ++at;
    if (digits() == 0) return false;
  }
  return at == word.size();
}

/// Rewrites in one pass. Its only grammar is `last_` and the stack of open brackets.
class Rewriter {
 public:
  explicit Rewriter(std::string_view given) : given_(given) {
    if (given_.starts_with("\xEF\xBB\xBF")) at_ = 3;
  }

  StrictJson operator()() {
    while (skip()) {
      switch (given_[at_]) {
        case '{':
        case '[':
          open();
          break;
        case '}':
        case ']':
          close();
          break;
        case ',':
          before(false);
          comma_ = at_++;
          break;
        case ':':
          before(false);
          copy();
          last_ = Last::colon;
          break;
        case '"':
        case '\'':
          quoted();
          break;
        default:
          word();
      }
      new_line_ = false;
    }
    before(false);
    strict_.origin.push_back(given_.size());
    return std::move(strict_);
  }

 private:
  enum class Last : std::uint8_t { open, comma, colon, key, value };

  [[noreturn]] void fail(std::size_t at, const std::string& what) const {
    throw InvalidArgument(place_in(given_, at) + ": " + what);
  }
  void put(char c, std::size_t from) {
    strict_.text += c;
    strict_.origin.push_back(from);
  }
  void copy() {
    put(given_[at_], at_);
    ++at_;
  }
  bool starts_with(std::string_view text) const { return given_.substr(at_).starts_with(text); }
  bool at_comment() const { return given_[at_] == '#' || starts_with("//") || starts_with("/*"); }

  /// Skips to the next token, writing a blank for skipped text so that neighbouring tokens stay apart; false
  /// at the end.
  bool skip() {
    const std::size_t begin = at_;
    while (at_ < given_.size() && (is_blank(given_[at_]) || at_comment())) {
      if (is_blank(given_[at_])) {
        if (given_[at_] == '\n') new_line_ = true;
        ++at_;
        continue;
      }
      const bool to_line_end = !starts_with("/*");
      const std::size_t end = to_line_end ? given_.find('\n', at_) : given_.find("*/", at_ + 2);
      if (end == std::string_view::npos && !to_line_end) fail(at_, "the comment that begins here has no end");
      at_ = end == std::string_view::npos ? given_.size() : to_line_end ? end : end + 2;
    }
    if (at_ > begin) put(' ', begin);
    return at_ < given_.size();
  }

  /// Writes a pending comma once the next token is known: the comma before a closing bracket is dropped.
  void before(bool closes) {
    if (!comma_) return;
    if (!closes || last_ != Last::value) {
      put(',', *comma_);
      last_ = Last::comma;
    }
    comma_.reset();
  }

  /// Called in front of a key or a value: writes the comma that the end of a line stands for.
  void begin_entry() {
    before(false);
    if (last_ != Last::value || !new_line_ || open_.empty()) return;
    put(',', at_);
    last_ = Last::comma;
  }
  bool is_key() const {
    return !open_.empty() && open_.back() == '{' && (last_ == Last::open || last_ == Last::comma);
  }

  void open() {
    begin_entry();
    if (open_.size() == deepest_json)
      fail(at_, fmt::format("blocks are nested deeper than {}", deepest_json));
    open_ += given_[at_];
    copy();
    last_ = Last::open;
  }

  void close() {
    before(true);
    if (!open_.empty()) open_.pop_back();
    copy();
    last_ = Last::value;
  }

  void quoted() {
    begin_entry();
    if (starts_with("'''")) fail(at_, "text of several lines in ''' is not read; write it in \"...\"");
    last_ = is_key() ? Last::key : Last::value;
    const char quote = given_[at_];
    put('"', at_++);
    while (at_ < given_.size() && given_[at_] != quote) {
      if (given_[at_] == '\\' && at_ + 1 < given_.size()) {
        if (given_[at_ + 1] == '\'') {
          ++at_;  // JSON has no \'
        } else {
          copy();
        }
      } else if (given_[at_] == '"') {
        put('\\', at_);
      }
      copy();
    }
    if (at_ < given_.size()) put('"', at_++);
  }

  void word() {
    begin_entry();
    const std::size_t begin = at_;
    while (at_ < given_.size() && !is_blank(given_[at_]) && !at_comment() &&
           std::string_view("{}[],:\"'").find(given_[at_]) == std::string_view::npos) {
      ++at_;
    }
    const std::string_view text = given_.substr(begin, at_ - begin);
    const bool key = is_key();
    last_ = key ? Last::key : Last::value;
    if (!key) {
      for (const auto& [name, literal] : literals) {
        if (text != name) continue;
        for (std::size_t i = 0; i < literal.size(); ++i)
          put(literal[i], begin + std::min(i, text.size() - 1));
        return;
      }
    }
    const bool quotes = key || !is_number(text);
    if (quotes && !key) require_one_word(begin);
    if (quotes) put('"', begin);
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '\\') put('\\', begin + i);
      put(text[i], begin + i);
    }
    if (quotes) put('"', at_ - 1);
  }

  /// A value without quotes ends at the end of its line, its entry or its object. In HJSON a sign of comments
  /// within it is a part of it, so that it needs quotes here: /data/run#1.
  void require_one_word(std::size_t begin) const {
    if (starts_with("#") || starts_with("//")) fail(begin, "text with # or // in it needs quotes");
    std::size_t next = at_;
    while (next < given_.size() && (given_[next] == ' ' || given_[next] == '\t' || given_[next] == '\r'))
      ++next;
    if (next == given_.size() || std::string_view("\n,}]#").find(given_[next]) != std::string_view::npos)
      return;
    const std::string_view rest = given_.substr(next);
    if (rest.starts_with("//") || rest.starts_with("/*")) return;
    fail(begin, "text that is not one word needs quotes");
  }

  static constexpr std::pair<std::string_view, std::string_view> literals[] = {
      {"true", "true"}, {"false", "false"}, {"null", "null"},
      {"True", "true"}, {"False", "false"}, {"None", "null"}};

  std::string_view given_;
  StrictJson strict_;
  std::size_t at_ = 0;
  std::string open_;                  ///< brackets not closed yet
  std::optional<std::size_t> comma_;  ///< position of a comma not written yet
  Last last_ = Last::open;
  bool new_line_ = false;  ///< since the last token
};

}  // namespace

StrictJson strict_json(std::string_view relaxed) {
  return Rewriter(relaxed)();
}

std::string place_in(std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  const std::size_t line_begin = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  return fmt::format("line {}, column {}", std::count(before.begin(), before.end(), '\n') + 1,
                     before.size() - line_begin + 1);
}

}  // namespace tranche::detail
