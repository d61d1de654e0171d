#pragma once
/// A template as a tree.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "training/chat_template/value.h"

namespace tranche::training::jinja {

struct Expression;
using Part = std::unique_ptr<Expression>;

struct Expression {
  enum class Kind : std::uint8_t {
    constant,
    name,         ///< `text`
    list,         ///< parts
    tuple,        ///< parts
    map,          ///< parts: a key and a value in turn
    attribute,    ///< parts[0] . text
    item,         ///< parts[0] [ parts[1] ]
    slice,        ///< parts[0] [ parts[1] : parts[2] : parts[3] ]; parts may be null
    call,         ///< parts[0] ( parts[1], ..., keywords )
    filter,       ///< parts[0] | text ( parts[1], ..., keywords )
    test,         ///< parts[0] is text ( parts[1], ... )
    negation,     ///< not parts[0]
    both,         ///< parts[0] and parts[1]
    either,       ///< parts[0] or parts[1]
    conditional,  ///< parts[1] if parts[0] else parts[2], which may be null
    comparison,   ///< parts[0] signs[0] parts[1] signs[1] parts[2] ...
    joined,       ///< parts[0] ~ parts[1] ~ ...
    arithmetic,   ///< parts[0] text parts[1], or text parts[0]
  };
  Kind kind = Kind::constant;
  int line = 0;
  int height = 1;  ///< of the tree below, this node included
  std::string text;
  Value constant;
  std::vector<Part> parts;
  std::vector<std::pair<std::string, Part>> keywords;
  std::vector<std::string> signs;
};

struct Statement;
using Block = std::vector<Statement>;

struct Statement {
  enum class Kind : std::uint8_t {
    text,        ///< `text` is written
    output,      ///< parts[0] is written
    branches,    ///< blocks[i] if parts[i] is the first true one; an additional block is `else`
    loop,        ///< for names in parts[0] if parts[1], which may be null: blocks[0]; else: blocks[1]
    assignment,  ///< set names = parts[0]
    capture,     ///< set names = output of blocks[0]
    macro,       ///< text (names, whose last ones have the defaults parts): blocks[0]
    generation,  ///< blocks[0], whose output is the assistant's
    stop,        ///< ends the innermost loop
    next,        ///< continues with the innermost loop's next round
  };
  Kind kind = Kind::text;
  int line = 0;
  std::string text;
  std::vector<std::string> names;
  std::string attribute;  ///< for an assignment to this attribute of the namespace names[0]
  std::vector<Part> parts;
  std::vector<Block> blocks;
};

/// Parses a template. Refuses syntax that Jinja does not know, and unsupported syntax, each with its line.
Block parse(std::string_view source);

}  // namespace tranche::training::jinja
