#pragma once
/// Text that is stored in a file instead of in memory.

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tranche::tools {

/// A file without a name, which disappears with the process however that ends.
class Spool {
 public:
  /// The file is beside `path`, the text's final destination, or in the folder for temporary files if `path`
  /// is not a regular file or its folder is not writable. Throws ConfigurationError.
  explicit Spool(const std::string& path);
  /// Adds text. A failure is reported only by read(), so that it does not end a run.
  void add(std::string_view text);
  bool empty() const noexcept { return empty_; }
  /// Passes all text to `take`, a part at a time. Throws IoError if text could not be read, or could not be
  /// added earlier.
  void read(const std::function<void(std::string_view piece)>& take);

 private:
  [[noreturn]] void fail(int error) const;
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  bool empty_ = true;
  int error_ = 0;  ///< errno of the first failed add()
};

}  // namespace tranche::tools
