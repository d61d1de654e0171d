#pragma once
/// A template's text as tokens, with the rules for blanks that transformers sets (trim_blocks,
/// lstrip_blocks).

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::training::jinja {

struct Token {
  enum class Kind : std::uint8_t {
    data,  ///< text that is written as it is
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

/// Refuses what is no token, with its line. The last token is an `end`.
std::vector<Token> tokens_of(std::string_view source);

}  // namespace tranche::training::jinja
