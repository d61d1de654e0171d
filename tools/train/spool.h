#pragma once
/// Text that waits in a file instead of in memory.

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tranche::tools {

/// A file without a name, which goes away with the process however that ends.
class Spool {
 public:
  /// The file lies beside `path`, where the text is to go in the end, or in the folder for temporary files
  /// where `path` is no regular file or its folder takes none. Throws ConfigurationError.
  explicit Spool(const std::string& path);
  /// A failure is told by read(): a run does not end for its report.
  void add(std::string_view text);
  bool empty() const noexcept { return empty_; }
  /// Hands over all text in pieces. Throws IoError of what could not be read, or not be added before.
  void read(const std::function<void(std::string_view piece)>& take);

 private:
  [[noreturn]] void fail(int error) const;
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  bool empty_ = true;
  int error_ = 0;  ///< errno of the first add() that failed
};

}  // namespace tranche::tools
