#include "data/word_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "tranche/core/error.h"

namespace tranche::data {

namespace {

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

[[noreturn]] void refuse(std::string_view part) {
  throw InvalidArgument(fmt::format("it has '{}', which is not supported", part));
}

/// The pattern for PCRE2, whose \s holds U+180E, which is not white space since Unicode 6.3. Refuses what the
/// two libraries understand differently: other escapes, scripts (\p{Han}), and classes within classes.
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
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr);
  if (code == nullptr) throw InvalidArgument(message_of(error));
  code_ = std::make_shared<Code>(code);
  std::uint32_t empty = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &empty);
  if (empty != 0) throw InvalidArgument("it matches the empty text");
  (void)pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // it is interpreted where that fails
}

void WordPattern::split(std::string_view text, const std::function<void(std::string_view)>& visit) const {
  const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> match(
      pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  if (!match) throw std::bad_alloc();
  const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(match.get());
  std::size_t done = 0, from = 0;
  while (from < text.size()) {
    const int found = pcre2_match(code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                                  PCRE2_NO_UTF_CHECK, match.get(), nullptr);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) throw InvalidArgument(message_of(found));
    if (range[0] > done) visit(text.substr(done, range[0] - done));
    if (range[1] > range[0]) visit(text.substr(range[0], range[1] - range[0]));
    done = range[1];
    from = std::max(range[1], from + 1);  // forward in any case: lookbehinds may match nothing
    while (from < text.size() && (static_cast<unsigned char>(text[from]) & 0xc0) == 0x80) ++from;
  }
  if (done < text.size()) visit(text.substr(done));
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
  // No character below U+0300, the first that composes with the one before it, changes: its bytes begin with
  // 0xcc.
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

}  // namespace tranche::data
