#pragma once
/// Limits on the work of a template, in proportion to its inputs.

#include <cstddef>
#include <string>
#include <utility>

namespace tranche::training::jinja {

/// The refusal of a template, or a template's own refusal of its messages. `line` is 0 if it is unknown.
struct Refusal {
  std::string what;
  int line = 0;
};
[[noreturn]] inline void refuse(std::string what, int line = 0) {
  throw Refusal{std::move(what), line};
}

/// The deepest nesting of expressions, blocks and values.
inline constexpr int most_nested = 64;

/// Counts steps. Each evaluated expression is one step, and so are 32 bytes of created text or 4 visited
/// entries of a list, so the number of steps bounds time and memory.
class Work {
 public:
  /// `bytes`: the size of the template and of its values.
  explicit Work(std::size_t bytes) : left_(100'000 + 32 * bytes), bytes_(bytes) {}

  void steps(std::size_t count) {
    if (count > left_) {
      refuse("takes more work than its text and its messages of " + std::to_string(bytes_) +
             " bytes account for: a loop or a text grows beyond every use");
    }
    left_ -= count;
  }
  void text(std::size_t bytes) { steps(1 + bytes / 32); }
  void entries(std::size_t count) { steps(1 + count / 4); }

 private:
  std::size_t left_, bytes_;
};

}  // namespace tranche::training::jinja
