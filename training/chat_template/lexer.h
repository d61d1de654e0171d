#pragma once
/// Divides a template's text into tokens, with transformers' settings for blanks (trim_blocks,
/// lstrip_blocks).

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::training::jinja {

struct Token {
  enum class Kind : std::uint8_t {
    data,  ///< text that is written unchanged
    output_begin,
    output_end,
    block_begin,
    block_end,
    name,
    text,
    integer,
    number,
    sign,  ///< an operator or a bracket
    end,
  };
  Kind kind = Kind::end;
  std::string text;
  int line = 1;
};

/// Refuses invalid text, with its line. The last token is an `end`.
std::vector<Token> tokens_of(std::string_view source);

}  // namespace tranche::training::jinja
