#pragma once
#include <functional>
#include <string>
#include <string_view>

namespace tranche::tools {

/// Bytes of text as they come, for people: written a whole UTF-8 character at a time, through printable() in
/// a terminal, untouched elsewhere.
class TextStream {
 public:
  using Writer = std::function<void(std::string_view)>;
  TextStream(bool terminal, Writer write) : terminal_(terminal), write_(std::move(write)) {}
  void add(std::string_view bytes);
  /// Writes what is left of a character that did not end.
  void finish();

 private:
  void flush(std::size_t bytes);
  bool terminal_;
  Writer write_;
  std::string held_;
};

}  // namespace tranche::tools
