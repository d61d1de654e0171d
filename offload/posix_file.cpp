#include "offload/posix_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "offload/io_failure.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"

namespace tranche::detail {
namespace {

// A block size that all disks support, and at least a page, because one page of the cache must not hold both
// cached and direct bytes.
constexpr std::int64_t least_alignment = 4096;

int flags_of(OpenMode mode) {
  switch (mode) {
    case OpenMode::read:
      return O_RDONLY;
    case OpenMode::update:
      return O_RDWR;
    case OpenMode::create_new:
      return O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW;
    case OpenMode::create_or_truncate:
      return O_RDWR | O_CREAT | O_TRUNC;
  }
  throw InvalidArgument("unknown OpenMode");
}

std::string_view verb_of(OpenMode mode) {
  switch (mode) {
    case OpenMode::read:
      return "opening for reading";
    case OpenMode::update:
      return "opening for update";
    default:
      return "creation";
  }
}

void check_range(std::string_view operation, const std::string& path, std::int64_t offset,
                 std::int64_t bytes) {
  if (offset >= 0 && bytes >= 0) return;
  throw InvalidArgument(std::string(operation) + " of '" + path + "': offset " + std::to_string(offset) +
                        " and " + std::to_string(bytes) + " B must not be negative");
}

std::string_view name_of(IoCall call) {
  return call == IoCall::read ? "read" : "write";
}

}  // namespace

DirectPart direct_part(const NativeFile& file, std::int64_t offset, const void* memory, std::int64_t bytes) {
  if (file.direct < 0) return {offset, offset};
  const std::int64_t begin = round_up(offset, file.offset_alignment);
  const std::int64_t end = (offset + bytes) / file.offset_alignment * file.offset_alignment;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(memory)) + (begin - offset);
  if (begin >= end || address % file.memory_alignment != 0) return {offset, offset};
  return {begin, end};
}

PosixFile::PosixFile(const std::string& path, OpenMode mode, Caching caching, const IoHook& hook)
    : File(path), hook_(hook) {
  do {
    // O_NONBLOCK makes the open of a pipe without a writer return; the pipe is then refused.
    descriptors_.buffered = ::open(path.c_str(), flags_of(mode) | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0666);
  } while (descriptors_.buffered < 0 && errno == EINTR);
  if (descriptors_.buffered < 0) throw_io_error({std::string(verb_of(mode)), path, errno, -1, 0});
  try {
    require_regular(mode);
  } catch (...) {
    ::close(descriptors_.buffered);
    throw;
  }
  if (caching == Caching::direct) open_direct(mode);
  // Direct transfers put only the unaligned ends of their ranges into the page cache. Read-ahead would add
  // blocks there that are then transferred directly too.
  if (caching == Caching::shared || descriptors_.direct >= 0) {
    posix_fadvise(descriptors_.buffered, 0, 0, POSIX_FADV_RANDOM);
  }
}

void PosixFile::require_regular(OpenMode mode) const {
  struct stat status {};
  int code = ::fstat(descriptors_.buffered, &status) == 0 ? 0 : errno;
  if (code == 0 && S_ISDIR(status.st_mode)) code = EISDIR;
  // With O_NONBLOCK, asynchronous transfers of a file may return without having waited for the disk.
  if (code == 0 && S_ISREG(status.st_mode) && ::fcntl(descriptors_.buffered, F_SETFL, 0) != 0) {
    code = errno;
  }
  if (code != 0) throw_io_error({std::string(verb_of(mode)), path(), code, -1, 0});
  if (S_ISREG(status.st_mode)) return;
  throw IoError(std::string(verb_of(mode)) + " of '" + path() +
                    "' failed: it is a pipe, a socket or a device: name a regular file, or remove it",
                EINVAL);
}

PosixFile::~PosixFile() {
  if (descriptors_.direct >= 0) ::close(descriptors_.direct);
  ::close(descriptors_.buffered);
}

void PosixFile::open_direct(OpenMode mode) {
  const std::int64_t allowed_result = allowed(IoCall::open_direct, 0);
  // The file is reopened by its descriptor, because its path may name another file by now.
  const std::string name = "/proc/self/fd/" + std::to_string(descriptors_.buffered);
  const int access = mode == OpenMode::read ? O_RDONLY : O_RDWR;
  int descriptor = -1;
  errno = static_cast<int>(-allowed_result);
  if (allowed_result >= 0) {
    descriptor = ::open(name.c_str(), access | O_DIRECT | O_CLOEXEC);
    if (descriptor < 0 && errno == ENOENT) descriptor = ::open(path().c_str(), access | O_DIRECT | O_CLOEXEC);
  }
  if (descriptor < 0) {
    refusal_ = "the file system of '" + path() + "' refuses direct I/O (" + std::strerror(errno) +
               "); transfers go through the page cache";
    return;
  }
  std::int64_t offset_alignment = std::max<std::int64_t>(least_alignment, sysconf(_SC_PAGESIZE));
  std::int64_t memory_alignment = least_alignment;
#ifdef STATX_DIOALIGN
  struct statx status {};
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    if (status.stx_dio_offset_align == 0) {
      ::close(descriptor);
      refusal_ = "the file system says that '" + path() +
                 "' takes no direct I/O; transfers go through the page cache";
      return;
    }
    offset_alignment = std::max<std::int64_t>(offset_alignment, status.stx_dio_offset_align);
    memory_alignment = std::max<std::int64_t>(1, status.stx_dio_mem_align);
  }
#endif
  descriptors_.direct = descriptor;
  descriptors_.offset_alignment = offset_alignment;
  descriptors_.memory_alignment = memory_alignment;
}

std::optional<NativeFile> PosixFile::native() const {
  if (hook_) return std::nullopt;
  return descriptors_;
}

std::int64_t PosixFile::size() const {
  struct stat status {};
  if (::fstat(descriptors_.buffered, &status) != 0)
    throw_io_error({"reading the size", path(), errno, -1, 0});
  return status.st_size;
}

void PosixFile::preallocate(std::int64_t bytes) {
  check_range("preallocation", path(), 0, bytes);
  if (bytes == 0) return;
  std::int64_t result = allowed(IoCall::preallocate, bytes);
  if (result >= 0) {
    do {
      result = ::fallocate(descriptors_.buffered, 0, 0, bytes) == 0 ? 0 : -errno;
    } while (result == -EINTR);
  }
  if (result >= 0) return;
  // posix_fallocate would write zeros instead, which costs as much as the data itself.
  if (result == -EOPNOTSUPP || result == -ENOSYS) {
    if (size() < bytes) truncate(bytes);
    return;
  }
  throw_io_error({"preallocation", path(), static_cast<int>(-result), 0, bytes});
}

void PosixFile::read(std::int64_t offset, void* memory, std::int64_t bytes) {
  check_range("read", path(), offset, bytes);
  transfer(IoCall::read, offset, static_cast<char*>(memory), bytes);
}

void PosixFile::write(std::int64_t offset, const void* memory, std::int64_t bytes) {
  check_range("write", path(), offset, bytes);
  // A write only reads from this memory; transfer() has one pointer for both directions.
  transfer(IoCall::write, offset, static_cast<char*>(const_cast<void*>(memory)), bytes);
}

void PosixFile::transfer(IoCall call, std::int64_t offset, char* memory, std::int64_t bytes) {
  std::int64_t done = 0;
  const auto go_to = [&](int descriptor, std::int64_t end) {
    done += transfer_by(descriptor, call, offset + done, memory + done, end - offset - done);
  };
  const DirectPart direct = direct_part(descriptors_, offset, memory, bytes);
  go_to(descriptors_.buffered, direct.begin);
  if (direct.begin < direct.end) go_to(descriptors_.direct, direct.end);
  go_to(descriptors_.buffered, offset + bytes);
}

std::int64_t PosixFile::transfer_by(int descriptor, IoCall call, std::int64_t offset, char* memory,
                                    std::int64_t bytes) {
  // Linux transfers at most 2 GiB - 4 KiB at once; a power of two below that keeps each part aligned.
  constexpr std::int64_t largest = std::int64_t{1} << 30;
  std::int64_t done = 0;
  while (done < bytes) {
    std::int64_t result = allowed(call, std::min(bytes - done, largest));
    if (result > 0) {
      const auto count = static_cast<std::size_t>(result);
      result = call == IoCall::read ? ::pread(descriptor, memory + done, count, offset + done)
                                    : ::pwrite(descriptor, memory + done, count, offset + done);
      if (result < 0) result = -errno;
    }
    if (result == -EINTR || result == -EAGAIN) continue;
    const bool is_direct = descriptor == descriptors_.direct;
    if (is_direct && result == -EINVAL)
      return done;  // e.g. on file systems that only accept O_DIRECT: continue by the page cache
    if (result < 0) {
      throw_io_error(
          {std::string(name_of(call)), path(), static_cast<int>(-result), offset + done, bytes - done});
    }
    if (result == 0) {
      throw_io_error(
          {std::string(name_of(call)), path(), call == IoCall::read ? 0 : EIO, offset + done, bytes - done});
    }
    done += result;
    if (is_direct && done % descriptors_.offset_alignment != 0) return done;
  }
  return done;
}

void PosixFile::truncate(std::int64_t bytes) {
  check_range("truncation", path(), 0, bytes);
  int result = 0;
  do {
    result = ::ftruncate(descriptors_.buffered, bytes);
  } while (result != 0 && errno == EINTR);
  if (result != 0) throw_io_error({"truncation", path(), errno, 0, bytes});
}

void PosixFile::sync() {
  std::int64_t result = allowed(IoCall::sync, 0);
  if (result >= 0) {
    do {
      result = ::fdatasync(descriptors_.buffered) == 0 ? 0 : -errno;
    } while (result == -EINTR);
  }
  // A failed sync is never repeated: the kernel has dropped the pages that it could not write, so the next
  // sync would succeed.
  if (result < 0) throw_io_error({"sync", path(), static_cast<int>(-result), -1, 0});
}

}  // namespace tranche::detail
