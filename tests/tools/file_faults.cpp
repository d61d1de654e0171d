// A library for LD_PRELOAD, whose calls on files fail where scripts/fault_test.py specifies: it imitates what
// a disk, a full file system or the end of the process does to a program.
//
// TRANCHE_FAULTS_BELOW   a folder by its absolute path; only calls on its contents count. The random parts of
// names
//                        of temporary files are replaced by "*".
// TRANCHE_FAULTS_LOG     a file to which each such call is appended: rank, call, path below the folder,
// occurrence
//                        (from 1)
// TRANCHE_FAULTS_AT      the call that is disturbed, as a line of the log
// TRANCHE_FAULTS_ACTION  its fault: a number (errno), "kill" (SIGKILL before it), "killed" (SIGKILL after
// it),
//                        "short" (reads and writes transfer one byte less than half), "slow" (0.3 s)
// TRANCHE_FAULTS_TIMES   the number of calls of its kind on its path that are disturbed from there on (1); 0:
// all
//
// io_uring calls return ENOSYS, so that all transfers are calls that can be disturbed.

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <regex>
#include <string>

namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

struct Plan {
  std::string below = variable("TRANCHE_FAULTS_BELOW");
  std::string rank = variable("OMPI_COMM_WORLD_RANK").empty() ? "0" : variable("OMPI_COMM_WORLD_RANK");
  std::string at = variable("TRANCHE_FAULTS_AT");
  std::string action = variable("TRANCHE_FAULTS_ACTION");
  int times =
      variable("TRANCHE_FAULTS_TIMES").empty() ? 1 : std::atoi(variable("TRANCHE_FAULTS_TIMES").c_str());
  int log = -1;
  std::mutex mutex;
  std::map<std::string, int> seen;
  int struck = 0;

  Plan() {
    const std::string path = variable("TRANCHE_FAULTS_LOG");
    if (!path.empty())
      log = static_cast<int>(
          syscall(SYS_openat, AT_FDCWD, path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  }
};

// This is never destroyed, because calls continue until the process has ended.
Plan& plan() {
  static Plan& only = *new Plan;
  return only;
}

std::string path_of(int descriptor) {
  char name[64], path[4096];
  std::snprintf(name, sizeof(name), "/proc/self/fd/%d", descriptor);
  const auto length = syscall(SYS_readlink, name, path, sizeof(path));
  return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : "";
}

/// The path below the folder, with random parts replaced by "*"; empty for other paths.
std::string counted(std::string path) {
  const std::string& below = plan().below;
  if (below.empty() || path.empty()) return {};
  if (path[0] != '/') {
    char folder[4096];
    if (syscall(SYS_getcwd, folder, sizeof(folder)) < 0) return {};
    path = std::string(folder) + "/" + path;
  }
  if (path.compare(0, below.size(), below) != 0 || (path.size() > below.size() && path[below.size()] != '/'))
    return {};
  std::string name = path.size() > below.size() + 1 ? path.substr(below.size() + 1) : ".";
  static const std::regex& chance =
      *new std::regex("(tranche-swap-|\\.probe-)[^./ ]+(?: \\(deleted\\))?|[0-9a-f]{16}");
  return std::regex_replace(name, chance, "$1*");
}

enum class Verdict { pass, fail, partial, die_after };

void die() {
  syscall(SYS_kill, getpid(), SIGKILL);
  for (;;) pause();
}

/// Counts a call and returns its fault, if any; sets errno for a failure.
Verdict strike(const char* call, const std::string& path) {
  const std::string name = counted(path);
  if (name.empty()) return Verdict::pass;
  Plan& now = plan();
  const std::string kind = now.rank + " " + call + " " + name;
  bool hit = false;
  {
    const std::lock_guard lock(now.mutex);
    const std::string line = kind + " " + std::to_string(++now.seen[kind]);
    if (now.log >= 0) {
      const std::string text = line + "\n";
      (void)!syscall(SYS_write, now.log, text.data(), text.size());
    }
    const bool again = now.struck > 0 && (now.times == 0 || now.struck < now.times) &&
                       now.at.compare(0, kind.size() + 1, kind + " ") == 0;
    hit = line == now.at || again;
    now.struck += hit;
  }
  if (!hit) return Verdict::pass;
  if (now.action == "kill") die();
  if (now.action == "killed") return Verdict::die_after;
  if (now.action == "short") return Verdict::partial;
  if (now.action == "slow") {
    usleep(300000);
    return Verdict::pass;
  }
  errno = std::atoi(now.action.c_str());
  return Verdict::fail;
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

/// Returns `run()` after the fault, or `failure`.
template <class Result, class Run>
Result struck(const char* call, const std::string& path, Result failure, Run run) {
  const Verdict verdict = strike(call, path);
  if (verdict == Verdict::fail) return failure;
  const Result result = run();
  if (verdict == Verdict::die_after) die();
  return result;
}

/// For reads and writes, which may also be shortened.
template <class Run>
ssize_t transferred(const char* call, int descriptor, std::size_t bytes, Run run) {
  const Verdict verdict = strike(call, path_of(descriptor));
  if (verdict == Verdict::fail) return -1;
  const ssize_t result = run(verdict == Verdict::partial && bytes > 1 ? (bytes - 1) / 2 : bytes);
  if (verdict == Verdict::die_after) die();
  return result;
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  const char* call = (flags & O_CREAT) != 0       ? "create"
                     : (flags & O_DIRECTORY) != 0 ? "open_folder"
                     : (flags & O_ACCMODE) != 0   ? "open_write"
                                                  : "open";
  // A file is opened a second time by its descriptor, without the page cache.
  const std::string name =
      std::strncmp(path, "/proc/self/fd/", 14) == 0 ? path_of(std::atoi(path + 14)) : path;
  return struck<int>(call, name, -1,
                     [&] { return next<int (*)(const char*, int, ...)>("open")(path, flags, mode); });
}

int open64(const char* path, int flags, ...) __attribute__((alias("open")));

ssize_t pread(int descriptor, void* memory, std::size_t bytes, off_t offset) {
  return transferred("read", descriptor, bytes, [&](std::size_t part) {
    return next<ssize_t (*)(int, void*, std::size_t, off_t)>("pread")(descriptor, memory, part, offset);
  });
}

ssize_t pread64(int, void*, std::size_t, off_t) __attribute__((alias("pread")));

ssize_t read(int descriptor, void* memory, std::size_t bytes) {
  return transferred("read", descriptor, bytes, [&](std::size_t part) {
    return next<ssize_t (*)(int, void*, std::size_t)>("read")(descriptor, memory, part);
  });
}

ssize_t pwrite(int descriptor, const void* memory, std::size_t bytes, off_t offset) {
  return transferred("write", descriptor, bytes, [&](std::size_t part) {
    return next<ssize_t (*)(int, const void*, std::size_t, off_t)>("pwrite")(descriptor, memory, part,
                                                                             offset);
  });
}

ssize_t pwrite64(int, const void*, std::size_t, off_t) __attribute__((alias("pwrite")));

int fsync(int descriptor) {
  return struck<int>("sync", path_of(descriptor), -1,
                     [&] { return next<int (*)(int)>("fsync")(descriptor); });
}

int fdatasync(int descriptor) {
  return struck<int>("sync", path_of(descriptor), -1,
                     [&] { return next<int (*)(int)>("fdatasync")(descriptor); });
}

int fallocate(int descriptor, int mode, off_t offset, off_t bytes) {
  return struck<int>("preallocate", path_of(descriptor), -1, [&] {
    return next<int (*)(int, int, off_t, off_t)>("fallocate")(descriptor, mode, offset, bytes);
  });
}

int fallocate64(int, int, off_t, off_t) __attribute__((alias("fallocate")));

int ftruncate(int descriptor, off_t bytes) {
  return struck<int>("truncate", path_of(descriptor), -1,
                     [&] { return next<int (*)(int, off_t)>("ftruncate")(descriptor, bytes); });
}

int ftruncate64(int, off_t) __attribute__((alias("ftruncate")));

int flock(int descriptor, int operation) {
  return struck<int>("lock", path_of(descriptor), -1,
                     [&] { return next<int (*)(int, int)>("flock")(descriptor, operation); });
}

int rename(const char* from, const char* to) {
  return struck<int>("rename", counted(from).empty() ? to : from, -1,
                     [&] { return next<int (*)(const char*, const char*)>("rename")(from, to); });
}

int remove(const char* path) {
  return struck<int>("remove", path, -1, [&] { return next<int (*)(const char*)>("remove")(path); });
}

int unlink(const char* path) {
  return struck<int>("remove", path, -1, [&] { return next<int (*)(const char*)>("unlink")(path); });
}

int rmdir(const char* path) {
  return struck<int>("remove", path, -1, [&] { return next<int (*)(const char*)>("rmdir")(path); });
}

int mkdir(const char* path, mode_t mode) {
  return struck<int>("make_folder", path, -1,
                     [&] { return next<int (*)(const char*, mode_t)>("mkdir")(path, mode); });
}

DIR* opendir(const char* path) {
  return struck<DIR*>("list", path, nullptr, [&] { return next<DIR* (*)(const char*)>("opendir")(path); });
}

int stat(const char* path, struct stat* status) {
  return struck<int>("look", path, -1,
                     [&] { return next<int (*)(const char*, struct stat*)>("stat")(path, status); });
}

int statvfs(const char* path, struct statvfs* status) {
  return struck<int>("space", path, -1,
                     [&] { return next<int (*)(const char*, struct statvfs*)>("statvfs")(path, status); });
}

int io_uring_queue_init(unsigned, void*, unsigned) {
  return -ENOSYS;
}

}  // extern "C"
