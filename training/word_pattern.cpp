#include "training/word_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>

#include "tranche/core/error.h"

namespace tranche::training {

namespace {

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

[[noreturn]] void refuse(std::string_view part) {
  throw InvalidArgument(fmt::format("it has '{}', which is not supported", part));
}

/// Translates a pattern for PCRE2, whose \s contains U+180E, which is not white space since Unicode 6.3.
/// Refuses syntax that the two libraries interpret differently: other escapes, scripts (\p{Han}), and nested
/// classes.
std::string translated(std::string_view pattern) {
  std::string result;
  bool in_class = false;
  for (std::size_t at = 0; at < pattern.size(); ++at) {
    const std::string_view rest = pattern.substr(at);
    if (rest[0] != '\\') {
      if (in_class && (rest[0] == '[' || rest.starts_with("&&"))) refuse(rest.substr(0, 2));
      if (rest[0] == '[' || rest[0] == ']') in_class = rest[0] == '[';
      result += rest[0];
      continue;
    }
    const char escaped = rest.size() > 1 ? rest[1] : '\0';
    const bool letter = (escaped >= 'a' && escaped <= 'z') || (escaped >= 'A' && escaped <= 'Z') ||
                        (escaped >= '0' && escaped <= '9') || escaped == '\0';
    if (letter && std::string_view("pPsSrntdD").find(escaped) == std::string_view::npos) {
      refuse(rest.substr(0, 2));
    }
    const std::size_t end = rest.find('}');
    if ((escaped == 'p' || escaped == 'P') && (rest.size() < 3 || rest[2] != '{' || end < 4 || end > 5)) {
      refuse(rest.substr(0, end == std::string_view::npos ? 2 : end + 1));
    }
    if (escaped == 's') {
      result += "\\p{wspace}";
    } else if (escaped == 'S') {
      result += "\\P{wspace}";
    } else {
      result += rest.substr(0, 2);
    }
    ++at;
  }
  return result;
}

}  // namespace

/// A compiled pattern. A match begins exactly at the requested byte, or there is none.
struct WordPattern::Code {
  explicit Code(pcre2_code* compiled) : code(compiled) {}
  ~Code() { pcre2_code_free(code); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  pcre2_code* code;
};

WordPattern::WordPattern(std::string_view pattern) {
  const std::string text = translated(pattern);
  int error = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* const code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_ANCHORED, &error, &at, nullptr);
  if (code == nullptr) throw InvalidArgument(message_of(error));
  code_ = std::make_shared<Code>(code);
  std::uint32_t empty = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &empty);
  if (empty != 0) throw InvalidArgument("it matches the empty text");
  (void)pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // falls back to the interpreter on failure
}

namespace {

/// The matches of one split() under a budget. PCRE2 counts steps anew at each start, so each start is a
/// separate call. It does not report the steps taken either, so a call is charged with its limit, which
/// starts small and grows when it was too small.
class Matcher {
 public:
  Matcher(const pcre2_code* code, std::string_view text, WordPattern::Budget& budget)
      : code_(code),
        text_(text),
        budget_(budget),
        match_(pcre2_match_data_create(1, nullptr), pcre2_match_data_free),
        context_(pcre2_match_context_create(nullptr), pcre2_match_context_free),
        stack_(nullptr, pcre2_jit_stack_free) {
    if (!match_ || !context_) throw std::bad_alloc();
  }

  /// The end of the match that begins at a byte; nullopt if there is none.
  std::optional<std::size_t> end_of_match(std::size_t from) {
    for (std::int64_t limit = first_limit;;) {
      const std::int64_t allowed = std::min(limit, budget_.steps);
      if (allowed <= 0) throw InvalidArgument("it takes too many steps for a text of this length");
      pcre2_set_match_limit(context_.get(), static_cast<std::uint32_t>(allowed));
      const int found = pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text_.data()), text_.size(), from,
                                    PCRE2_NO_UTF_CHECK, match_.get(), context_.get());
      budget_.steps -= allowed;
      if (found == PCRE2_ERROR_NOMATCH) return std::nullopt;
      if (found >= 0) return pcre2_get_ovector_pointer(match_.get())[1];
      if (found == PCRE2_ERROR_JIT_STACKLIMIT && !stack_) {
        give_stack();
      } else if (found == PCRE2_ERROR_MATCHLIMIT) {
        limit = std::min<std::int64_t>(limit * 8, largest_limit);
      } else {
        throw InvalidArgument(message_of(found));
      }
    }
  }

 private:
  static constexpr std::int64_t first_limit = 128, largest_limit = 1'000'000'000;

  /// Some patterns push a backtracking position for each character of a match. Unused pages are not
  /// allocated.
  void give_stack() {
    const std::size_t largest =
        std::min<std::size_t>((std::size_t{1} << 20) + 256 * text_.size(), std::size_t{1} << 31);
    stack_.reset(pcre2_jit_stack_create(std::size_t{1} << 16, largest, nullptr));
    if (!stack_) throw InvalidArgument(message_of(PCRE2_ERROR_JIT_STACKLIMIT));
    pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
  }

  const pcre2_code* code_;
  std::string_view text_;
  WordPattern::Budget& budget_;
  std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> match_;
  std::unique_ptr<pcre2_match_context, void (*)(pcre2_match_context*)> context_;
  std::unique_ptr<pcre2_jit_stack, void (*)(pcre2_jit_stack*)> stack_;
};

}  // namespace

WordPattern::Budget WordPattern::budget_for(std::size_t bytes) noexcept {
  return {10'000'000 + 512 * static_cast<std::int64_t>(bytes)};
}

void WordPattern::split(std::string_view text, Budget& budget,
                        const std::function<void(std::string_view)>& visit) const {
  Matcher matcher(code_->code, text, budget);
  std::size_t done = 0, from = 0;
  while (from < text.size()) {
    const auto end = matcher.end_of_match(from);
    if (end && *end > from) {
      if (from > done) visit(text.substr(done, from - done));
      visit(text.substr(from, *end - from));
      done = from = *end;
      continue;
    }
    if (end && from > done) {  // lookbehinds may match nothing
      visit(text.substr(done, from - done));
      done = from;
    }
    ++from;
    while (from < text.size() && (static_cast<unsigned char>(text[from]) & 0xc0) == 0x80) ++from;
  }
  if (done < text.size()) visit(text.substr(done));
}

bool WordPattern::begins(std::string_view text, Budget& budget) const {
  return Matcher(code_->code, text, budget).end_of_match(0).has_value();
}

std::size_t utf8_prefix(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    utf8proc_int32_t character = 0;
    const utf8proc_ssize_t bytes =
        utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data() + at),
                         static_cast<utf8proc_ssize_t>(text.size() - at), &character);
    if (bytes <= 0) break;
    at += static_cast<std::size_t>(bytes);
  }
  return at;
}

std::string normalization_form_c(std::string_view text) {
  // Characters below U+0300, the first that composes with the one before it, do not change: its bytes begin
  // with 0xcc.
  const bool changes =
      std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) >= 0xcc; });
  if (!changes) return std::string(text);
  utf8proc_uint8_t* composed = nullptr;
  const utf8proc_ssize_t bytes = utf8proc_map(
      reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
      &composed, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(composed, std::free);
  if (bytes < 0) return std::string(text);
  return {reinterpret_cast<const char*>(composed), static_cast<std::size_t>(bytes)};
}

namespace {

/// True for characters that neither compose with nor are reordered after earlier characters. Marks may, and
/// so may the vowels and final consonants of Hangul.
bool begins_anew(utf8proc_int32_t character) {
  const utf8proc_category_t category = utf8proc_category(character);
  const bool mark = category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC ||
                    category == UTF8PROC_CATEGORY_ME;
  return !mark && (character < 0x1160 || character > 0x11ff);
}

}  // namespace

std::vector<Place> places_of_form_c(std::string_view text) {
  std::vector<Place> places;
  std::size_t normalized = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = begin;
    while (end < text.size()) {
      utf8proc_int32_t character = 0;
      const utf8proc_ssize_t bytes =
          utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data() + end),
                           static_cast<utf8proc_ssize_t>(text.size() - end), &character);
      if (end > begin && (bytes <= 0 || begins_anew(character))) break;
      end += bytes <= 0 ? 1 : static_cast<std::size_t>(bytes);
    }
    const std::size_t bytes = normalization_form_c(text.substr(begin, end - begin)).size();
    if (bytes != end - begin) {
      places.push_back({normalized, begin});
      places.push_back({normalized + bytes, end});
    }
    normalized += bytes;
    begin = end;
  }
  return places;
}

}  // namespace tranche::training
