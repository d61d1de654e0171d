#pragma once
/// Limits of what a template may take, in proportion to what it was given.

#include <cstddef>
#include <string>
#include <utility>

namespace tranche::training::jinja {

/// A template that is refused, or that refuses its messages. `line` is 0 where the thrower does not know it.
struct Refusal {
  std::string what;
  int line = 0;
};
[[noreturn]] inline void refuse(std::string what, int line = 0) {
  throw Refusal{std::move(what), line};
}

/// Expressions, blocks and values inside one another.
inline constexpr int most_nested = 64;

/// Counts steps. Each expression that is evaluated is one step, and so are 32 bytes of a text that is made or
/// 4 entries of a list that are visited, so that the steps bound time and memory.
class Work {
 public:
  /// `bytes`: of the template and of the values that it is given.
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
