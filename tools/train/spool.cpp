#include "tools/train/spool.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "offload/file_system.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

/// Returns -1 with errno if no file can be created in the folder.
int nameless_file(const std::string& folder) {
  const int file = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0) return file;
  // Some file systems support only files with names.
  std::string name = detail::join_path(folder, ".tranche-XXXXXX");
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

}  // namespace

Spool::Spool(const std::string& path) : path_(path), file_(nullptr, &std::fclose) {
  std::error_code none;
  const auto status = std::filesystem::status(path, none);
  int file = -1;
  if (!std::filesystem::exists(status) || std::filesystem::is_regular_file(status)) {
    file = nameless_file(detail::parent_path(path));
  }
  if (file < 0) file = nameless_file(std::filesystem::temp_directory_path(none).string());
  if (file >= 0) file_.reset(::fdopen(file, "w+"));
  if (file_) return;
  const int error = errno;
  if (file >= 0) ::close(file);
  throw ConfigurationError(
      fmt::format("no temporary file can be made for '{}': {}; name a file in a folder where files can be "
                  "created, or set TMPDIR to such a folder",
                  path, std::strerror(error)));
}

void Spool::fail(int error) const {
  throw IoError(
      fmt::format("'{}' is not written, because its temporary file failed: {}", path_, std::strerror(error)),
      error);
}

void Spool::add(std::string_view text) {
  empty_ = false;
  errno = 0;
  if (error_ == 0 && std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size()) {
    error_ = errno != 0 ? errno : EIO;
  }
}

void Spool::read(const std::function<void(std::string_view piece)>& take) {
  if (error_ != 0) fail(error_);
  if (std::fflush(file_.get()) != 0 || std::fseek(file_.get(), 0, SEEK_SET) != 0) fail(errno);
  std::array<char, 1 << 16> piece;
  for (std::size_t size = 0; (size = std::fread(piece.data(), 1, piece.size(), file_.get())) > 0;) {
    take({piece.data(), size});
  }
  if (std::ferror(file_.get()) != 0) fail(errno);
  if (std::fseek(file_.get(), 0, SEEK_END) != 0) fail(errno);
}

}  // namespace tranche::tools
