#include "offload/io_failure.h"

#include <fmt/core.h>
#include <sys/statvfs.h>

#include <cerrno>
#include <cstring>

#include "offload/file_system.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

// strerror is not thread-safe everywhere; the GNU variant of strerror_r returns the text.
std::string reason_of(int code) {
  char storage[128];
  const char* text = strerror_r(code, storage, sizeof(storage));
  return text;
}

std::string free_space(const std::string& path) {
  struct statvfs status {};
  if (statvfs(path.c_str(), &status) != 0 && statvfs(parent_path(path).c_str(), &status) != 0) return {};
  return fmt::format(", {} B are free", static_cast<std::uint64_t>(status.f_bavail) * status.f_frsize);
}

std::string remedy(const IoFailure& failure) {
  switch (failure.code) {
    case 0:
      return "the file is shorter than it was written; something cut it";
    case ENOSPC:
      return fmt::format("{} B are needed{}: free space on this file system, or use another folder",
                         failure.bytes, free_space(failure.path));
    case EDQUOT:
      return "the quota of this user is used up: free space, or use another folder";
    case EROFS:
      return "the file system is read-only: use another folder, or mount it writable";
    case EACCES:
    case EPERM:
      return "this user may not: change the permissions of the folder, or use another one";
    case ENOENT:
      return "there is no such file or folder: check the path";
    case ENOTDIR:
      return "a part of the path is not a folder: check the path";
    case EISDIR:
      return "it is a folder: name a file";
    case EEXIST:
      return "it is there already: remove it, or use another name";
    case ENOTEMPTY:
      return "the folder is not empty";
    case EIO:
      return "the disk reports an error: see the system's log, and do not trust what the disk holds";
    case EMFILE:
      return "this process holds too many open files: raise 'ulimit -n'";
    case ENFILE:
      return "the system holds too many open files";
    case EFBIG:
      return "the file system or 'ulimit -f' allows no file of this size";
    case ECANCELED:
      return "it was called off before it had run; what the range now holds is undefined";
    case ESTALE:
      return "the file was removed on its server, or the connection was lost";
    default:
      return "see the system's log";
  }
}

}  // namespace

std::string describe(const IoFailure& failure) {
  std::string range;
  if (failure.offset >= 0) {
    range = fmt::format(" of bytes {} to {} ({} B)", failure.offset, failure.offset + failure.bytes - 1,
                        failure.bytes);
  }
  return fmt::format("{}{} of '{}' failed: {}; {}", failure.operation, range, failure.path,
                     failure.code == 0 ? "the file ends too early" : reason_of(failure.code),
                     remedy(failure));
}

void throw_io_error(const IoFailure& failure, std::source_location where) {
  throw IoError(describe(failure), failure.code, where);
}

}  // namespace tranche::detail
