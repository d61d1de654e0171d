#pragma once
/// A file that the program writes under a name given by the user: a report, a trace, a table.

#include <string>
#include <string_view>

namespace tranche::detail {

/// Writes a file as a whole: readers see the earlier file or the new one, never a part; without commit() the
/// earlier file stays. Symbolic links are followed: the file that they name is replaced (keeping its
/// permissions) or created. A file that is not regular (a device, a FIFO), or that standard output or error
/// go to, is written in place. A folder is refused, and so is a FIFO without a reader. Throws IoError "'PATH'
/// cannot be written: REASON".
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  /// Leaves nothing behind unless commit() has been called.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::string_view text);
  /// Publishes the written file; a regular file is durable afterwards.
  void commit();

 private:
  [[noreturn]] void fail(int error) const;
  void open_as_it_stands();
  void open_temporary();
  void flush();

  std::string path_;
  std::string target_;     ///< after following symbolic links
  std::string temporary_;  ///< beside the target; empty: `file_` is the target
  std::string buffer_;
  int file_ = -1;
};

void write_output_file(const std::string& path, std::string_view content);
/// Throws IoError unless the file could be written. It touches only the file's folder: a device or FIFO is
/// not opened, so that nothing waits for a reader.
void require_output_file(const std::string& path);

/// True for a path that begins with ~ for the home folder, which only a shell replaces.
inline bool begins_at_home(std::string_view path) {
  return path == "~" || path.starts_with("~/");
}

}  // namespace tranche::detail
