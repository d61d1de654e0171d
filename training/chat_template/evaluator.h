#pragma once
/// Evaluates templates with values.

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "training/chat_template/syntax.h"

namespace tranche::training::jinja {

/// A part of a text, in bytes.
struct Range {
  std::size_t begin = 0, end = 0;
};
/// The text that a template wrote while a loop over the messages was at one of them.
struct Turn {
  std::size_t message = 0;
  Range range;
};
struct Rendering {
  std::string text;
  std::vector<Range> generated;  ///< written by the blocks {% generation %}
  std::vector<Turn> turns;       ///< in the order of the text
  /// A {% generation %} block wrote something inside a macro or a block {% set %}, whose text may be placed
  /// anywhere.
  bool lost_marks = false;
};

struct Variables {
  std::vector<std::pair<std::string, Value>> values;  ///< "messages" is the list of the messages
  std::string date;                                   ///< see call_function()
  std::size_t bytes = 0;                              ///< size as text, which limits the work
};

/// Evaluates a template of `bytes` bytes. A Refusal has the line of the template. Thread-safe.
Rendering render(const Block& block, std::size_t bytes, const Variables& variables);

}  // namespace tranche::training::jinja
