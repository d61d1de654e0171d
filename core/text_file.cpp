#include "core/text_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "tranche/core/error.h"

namespace tranche::detail {

std::string read_text_file(const std::string& path, const std::string& what, Pipes pipes,
                           std::int64_t most_bytes) {
  const auto refuse = [&](const std::string& why) {
    throw ConfigurationError(fmt::format("{} '{}' cannot be read: {}", what, path, why));
  };
  // Without O_NONBLOCK, open() of a pipe waits until a writer opens it.
  const int waits = pipes == Pipes::allowed ? 0 : O_NONBLOCK;
  int descriptor = -1;
  do {
    descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | waits);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) refuse(std::strerror(errno));
  const auto close = [](const int* open) { ::close(*open); };
  const std::unique_ptr<const int, decltype(close)> closer(&descriptor, close);
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) refuse(std::strerror(errno));
  if (S_ISDIR(status.st_mode)) refuse("it is a folder");
  if (pipes == Pipes::refused && !S_ISREG(status.st_mode)) refuse("it is no regular file");
  std::string text;
  constexpr std::size_t block = 1 << 16;
  for (;;) {
    const std::size_t before = text.size();
    text.resize(before + block);
    const ssize_t got = ::read(descriptor, text.data() + before, block);
    if (got < 0 && errno != EINTR) refuse(std::strerror(errno));
    text.resize(before + static_cast<std::size_t>(got > 0 ? got : 0));
    if (got == 0) {
      if (is_lfs_pointer(text)) refuse(std::string("it ") + lfs_advice);
      return text;
    }
    if (text.size() > static_cast<std::size_t>(most_bytes)) {
      refuse(fmt::format("it has more than {} bytes, the most that is read of such a file", most_bytes));
    }
  }
}

const char* const lfs_advice =
    "is a Git LFS pointer, not the file itself: fetch it with 'git lfs pull', or download it";

bool is_lfs_pointer(std::string_view text) {
  return text.starts_with("version https://git-lfs.github.com/spec/");
}

}  // namespace tranche::detail
