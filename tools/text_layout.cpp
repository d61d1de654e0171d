#include "tools/text_layout.h"

#include <algorithm>

namespace tranche::tools {

std::string wrapped(std::string_view text, std::size_t at, std::size_t indent) {
  std::string lines;
  std::size_t column = at;
  bool first_word = true;
  const auto break_line = [&] {
    lines += "\n" + std::string(indent, ' ');
    column = indent;
    first_word = true;
  };
  while (!text.empty()) {
    const std::size_t end = std::min(text.find_first_of(" \n"), text.size());
    const std::string_view word = text.substr(0, end);
    if (!word.empty()) {
      if (!first_word && column + 1 + word.size() > text_width) break_line();
      lines += (first_word ? "" : " ") + std::string(word);
      column += word.size() + (first_word ? 0 : 1);
      first_word = false;
    }
    if (end < text.size() && text[end] == '\n') break_line();
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::string two_columns(std::string_view name, std::string_view text, std::size_t column) {
  std::string line = "  " + std::string(name);
  if (line.size() + 2 > column) {
    line += "\n" + std::string(column, ' ');
  } else {
    line.resize(column, ' ');
  }
  return line + wrapped(text, column, column) + "\n";
}

}  // namespace tranche::tools
