#include "training/chat_template/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/printable.h"
#include "training/chat_template/text.h"
#include "training/chat_template/work.h"

namespace tranche::training::jinja {

namespace {

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// Converts line ends to
/// , and drops one at the end of the text.
std::string with_plain_line_ends(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      if (i + 1 < source.size() && source[i + 1] == '\n') continue;
      text += '\n';
    } else {
      text += source[i];
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) read_data();
    add(Token::Kind::end, "");
    return std::move(tokens_);
  }

 private:
  using Kind = Token::Kind;

  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  void add(Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  void skip(std::size_t bytes) {
    const std::string_view passed = rest().substr(0, bytes);
    line_ += static_cast<int>(std::count(passed.begin(), passed.end(), '\n'));
    at_ += passed.size();
  }
  void skip_blanks() {
    while (const std::size_t bytes = blank_bytes(rest())) skip(bytes);
  }

  /// Reads the text up to the next tag, and the tag.
  void read_data() {
    std::size_t length = 0;
    for (;; ++length) {
      length = rest().find('{', length);
      if (length == std::string_view::npos || at_ + length + 1 >= source_.size()) {
        add(Kind::data, std::string(rest()));
        skip(rest().size());
        return;
      }
      if (const char next = source_[at_ + length + 1]; next == '{' || next == '%' || next == '#') break;
    }
    const std::size_t tag = at_ + length;
    const char kind = source_[tag + 1];
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    add_data(rest().substr(0, length), sign, kind != '{');
    skip(length);
    const std::size_t begin = sign == '-' || sign == '+' ? 3 : 2;
    if (kind == '#') {
      skip(begin);
      read_comment();
    } else if (kind == '%' && !read_raw(begin)) {
      add(Kind::block_begin, "{%");
      skip(begin);
      read_expression('%');
      add(Kind::block_end, "%}");
      skip_end('%');
    } else if (kind == '{') {
      add(Kind::output_begin, "{{");
      skip(begin);
      read_expression('}');
      add(Kind::output_end, "}}");
      skip_end('}');
    }
  }

  /// Adds the text before a tag whose sign may strip blanks.
  void add_data(std::string_view text, char sign, bool block) {
    std::string_view kept = text;
    if (sign == '-') {
      kept = without_blanks(text, false, true);
    } else if (sign != '+' && block) {
      const std::size_t line = text.rfind('\n') + 1;  // 0 where there is none
      const bool begins = line > 0 || at_ == 0 || source_[at_ - 1] == '\n';
      if (begins && without_blanks(text.substr(line)).empty()) kept = text.substr(0, line);
    }
    if (!kept.empty()) add(Kind::data, std::string(kept));
  }

  /// Skips the end of a tag, which is next: "-%}" with the following blanks, "+%}", or "%}" with a line end.
  void skip_end(char kind) {
    const char sign = source_[at_];
    skip(sign == '-' || sign == '+' ? 3 : 2);
    if (sign == '-') skip_blanks();
    if (sign != '-' && sign != '+' && kind != '}' && rest().starts_with('\n')) skip(1);
  }

  void read_comment() {
    const int line = line_;
    const std::size_t end = rest().find("#}");
    if (end == std::string_view::npos) refuse("a comment {# has no end #}", line);
    const bool sign = end > 0 && (rest()[end - 1] == '-' || rest()[end - 1] == '+');
    skip(sign ? end - 1 : end);
    skip_end('#');
  }

  /// Reads a block {% raw %} with its text; returns false if the tag is another one.
  bool read_raw(std::size_t begin) {
    const auto word_at = [&](std::size_t at, std::string_view word) -> std::size_t {
      while (at < source_.size() && blank_bytes(std::string_view(source_).substr(at)) > 0)
        at += blank_bytes(std::string_view(source_).substr(at));
      if (source_.compare(at, word.size(), word) != 0) return 0;
      at += word.size();
      while (at < source_.size() && blank_bytes(std::string_view(source_).substr(at)) > 0)
        at += blank_bytes(std::string_view(source_).substr(at));
      const std::size_t sign =
          at < source_.size() && (source_[at] == '-' || source_[at] == '+') ? std::size_t{1} : 0;
      return source_.compare(at + sign, 2, "%}") == 0 ? at : 0;
    };
    std::size_t end = word_at(at_ + begin, "raw");
    if (end == 0 || source_[end] == '+') return false;
    const int line = line_;
    const bool strips = source_[end] == '-';
    skip(end + (strips ? 3 : 2) - at_);
    if (strips) skip_blanks();
    for (std::size_t length = 0;; ++length) {
      length = rest().find("{%", length);
      if (length == std::string_view::npos) refuse("a block {% raw %} has no end {% endraw %}", line);
      const char sign = at_ + length + 2 < source_.size() ? source_[at_ + length + 2] : '\0';
      end = word_at(at_ + length + (sign == '-' || sign == '+' ? 3 : 2), "endraw");
      if (end == 0) continue;
      add_data(rest().substr(0, length), sign, true);
      skip(end - at_);
      skip_end('%');
      return true;
    }
  }

  bool at_end(char kind) const {
    const std::string_view text = rest();
    const bool sign = text.starts_with('-') || (kind == '%' && text.starts_with('+'));
    const std::string_view close = kind == '%' ? "%}" : "}}";
    return text.substr(sign ? 1 : 0).starts_with(close);
  }

  /// Reads tokens up to the end of a tag.
  void read_expression(char kind) {
    const int line = line_;
    std::string open;  // brackets
    for (;;) {
      skip_blanks();
      if (at_ >= source_.size()) {
        refuse(kind == '%' ? "a block {% has no end %}" : "an expression {{ has no end }}", line);
      }
      if (open.empty() && at_end(kind)) return;
      const char c = source_[at_];
      if (is_letter(c)) {
        add_while(Kind::name, [](char each) { return is_letter(each) || is_digit(each); });
      } else if (is_digit(c)) {
        read_number();
      } else if (c == '\'' || c == '"') {
        read_text(c);
      } else {
        read_sign(open);
      }
    }
  }

  template <typename Belongs>
  void add_while(Kind kind, const Belongs& belongs) {
    std::size_t length = 0;
    while (length < rest().size() && belongs(rest()[length])) ++length;
    add(kind, std::string(rest().substr(0, length)));
    skip(length);
  }

  void read_number() {
    std::size_t length = 0;
    const auto digits = [&] {
      const std::size_t before = length;
      while (length < rest().size() && is_digit(rest()[length])) ++length;
      return length > before;
    };
    digits();
    bool whole = true;
    // After a dot a number has no fraction, as in messages.0.content.
    const bool attribute =
        !tokens_.empty() && tokens_.back().text == "." && tokens_.back().kind == Kind::sign;
    if (!attribute && length + 1 < rest().size() && rest()[length] == '.' && is_digit(rest()[length + 1])) {
      whole = false;
      ++length;
      digits();
    }
    if (length < rest().size() && is_letter(rest()[length])) {
      refuse(fmt::format("the number '{}' is followed by '{}'", rest().substr(0, length), rest()[length]),
             line_);
    }
    const std::string_view text = rest().substr(0, length);
    if (whole && text.size() > 1 && text.front() == '0') {
      refuse(fmt::format("the number '{}' begins with 0", text), line_);
    }
    if (length > 18) refuse("a number has more than 18 digits", line_);
    add(whole ? Kind::integer : Kind::number, std::string(text));
    skip(length);
  }

  void read_text(char quote) {
    std::size_t end = 1;
    while (end < rest().size() && rest()[end] != quote) end += rest()[end] == '\\' ? 2 : 1;
    if (end >= rest().size()) refuse(fmt::format("a text that begins with {} has no end", quote), line_);
    add(Kind::text, unescaped(rest().substr(1, end - 1)));
    skip(end + 1);
  }

  /// Applies Python's escape sequences.
  std::string unescaped(std::string_view text) const {
    std::string result;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '\\') {
        result += text[i];
        continue;
      }
      const char c = text[++i];
      constexpr std::string_view letters = "\\'\"abfnrtv", characters = "\\'\"\a\b\f\n\r\t\v";
      if (const std::size_t found = letters.find(c); found != std::string_view::npos) {
        result += characters[found];
      } else if (c == '\n') {
        continue;
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const std::size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        const std::string_view number = text.substr(i + 1, digits);
        constexpr std::string_view hexadecimal = "0123456789abcdef0123456789ABCDEF";
        std::uint64_t value = 0;
        for (const char digit : number) {
          const std::size_t each = hexadecimal.find(digit);
          value = each == std::string_view::npos ? UINT64_MAX : value * 16 + each % 16;
          if (value > 0x10FFFF) break;
        }
        if (number.size() < digits || value > 0x10FFFF ||
            !append_character(result, static_cast<std::uint32_t>(value))) {
          refuse(fmt::format("the escape \\{}{} is no character", c, detail::printable(number)), line_);
        }
        i += digits;
      } else if (is_digit(c) || c == 'N') {
        refuse(fmt::format("the escape \\{} is not supported", c), line_);
      } else {
        result += '\\';
        result += c;
      }
    }
    return result;
  }

  void read_sign(std::string& open) {
    constexpr std::array<std::string_view, 26> signs{"**", "//", "==", "!=", ">=", "<=", "+", "-", "/",
                                                     "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                     ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    const auto found = std::find_if(signs.begin(), signs.end(),
                                    [&](std::string_view each) { return rest().starts_with(each); });
    if (found == signs.end()) {
      const std::string_view own = rest().substr(0, character_bytes(rest()));
      refuse(fmt::format("the character '{}' begins nothing", detail::printable(own)), line_);
    }
    const char c = found->front();
    constexpr std::string_view opening = "([{", closing = ")]}";
    if (opening.find(c) != std::string_view::npos) {
      open += c;
    } else if (const std::size_t which = closing.find(c); which != std::string_view::npos) {
      if (open.empty() || open.back() != opening[which]) {
        refuse(fmt::format("the bracket '{}' closes none", c), line_);
      }
      open.pop_back();
    }
    add(Kind::sign, std::string(*found));
    skip(found->size());
  }

  std::string source_;
  std::size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view source) {
  if (!is_utf8(source)) refuse("is not UTF-8");
  return Lexer(with_plain_line_ends(source)).run();
}

}  // namespace tranche::training::jinja
