// The operating system's files: their operations, and the texts of their failures.
#include "offload/file_system.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

#include "offload/aligned_buffer.h"
#include "offload/io_failure.h"
#include "tests/offload/disk_reads.h"
#include "tests/offload/faulty_file_system.h"
#include "tests/offload/test_folder.h"
#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

using detail::AlignedBuffer;
using detail::Caching;
using detail::File;
using detail::IoCall;
using detail::is_temporary_name;
using detail::join_path;
using detail::make_posix_file_system;
using detail::OpenMode;
using detail::temporary_name;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using testing::FaultyFileSystem;
using testing::FileOperation;
using ::testing::HasSubstr;
using testing::TestFolder;

class FileSystemTest : public ::testing::Test {
 protected:
  TestFolder folder_;
  detail::FileSystem& files_ = detail::posix_file_system();
};

template <class Action>
std::string failure_of(Action action, int code) {
  try {
    action();
  } catch (const IoError& error) {
    EXPECT_EQ(error.code(), code) << error.message();
    EXPECT_EQ(error.exit_status(), ExitStatus::other);
    return error.message();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

void put(File& file, std::int64_t offset, std::string_view text) {
  file.write(offset, text.data(), static_cast<std::int64_t>(text.size()));
}

TEST_F(FileSystemTest, OpenModes) {
  const std::string path = folder_ / "a";
  EXPECT_THAT(failure_of([&] { files_.open(path, OpenMode::read); }, ENOENT),
              AllOf(HasSubstr("opening for reading of '" + path + "' failed"), HasSubstr("check the path")));
  EXPECT_THAT(failure_of([&] { files_.open(path, OpenMode::update); }, ENOENT),
              HasSubstr("opening for update"));
  put(*files_.open(path, OpenMode::create_new), 0, "hello");
  EXPECT_THAT(failure_of([&] { files_.open(path, OpenMode::create_new); }, EEXIST),
              AllOf(HasSubstr("creation of"), HasSubstr("remove it, or use another name")));
  put(*files_.open(path, OpenMode::update), 1, "E");
  EXPECT_EQ(files_.read_file(path), "hEllo");
  EXPECT_EQ(files_.size(path), 5);
  EXPECT_THAT(failure_of([&] { put(*files_.open(path, OpenMode::read), 0, "x"); }, EBADF),
              HasSubstr("write of bytes 0 to 0 (1 B)"));
  EXPECT_EQ(files_.open(path, OpenMode::create_or_truncate)->size(), 0);
  EXPECT_THAT(failure_of([&] { files_.open(folder_.path(), OpenMode::update); }, EISDIR),
              HasSubstr("name a file"));
}

TEST_F(FileSystemTest, SizesAndEnds) {
  for (const Caching caching : {Caching::buffered, Caching::direct}) {
    const auto file = files_.open(folder_ / "a", OpenMode::create_or_truncate, caching);
    EXPECT_TRUE(file->direct() || caching == Caching::buffered || !file->direct_refusal().empty());
    file->preallocate(10'000);
    EXPECT_EQ(file->size(), 10'000);
    file->preallocate(5'000);
    file->preallocate(0);
    EXPECT_EQ(file->size(), 10'000);
    char byte = 'x';
    file->read(9'999, &byte, 1);
    EXPECT_EQ(byte, 0);
    file->truncate(100);
    EXPECT_THAT(failure_of(
                    [&] {
                      char storage[20];
                      file->read(90, storage, 20);
                    },
                    0),
                AllOf(HasSubstr("read of bytes 100 to 109 (10 B)"), HasSubstr("the file ends too early")));
    EXPECT_THROW(file->read(-1, &byte, 1), InvalidArgument);
    EXPECT_THROW(file->write(0, &byte, -1), InvalidArgument);
    EXPECT_THROW(file->preallocate(-1), InvalidArgument);
    EXPECT_THROW(file->truncate(-1), InvalidArgument);
    file->read(0, nullptr, 0);
    file->write(1'000'000, nullptr, 0);
    EXPECT_EQ(file->size(), 100);
    file->sync();
  }
}

TEST_F(FileSystemTest, SharedReadsComeFromTheDiskOnceAndWithoutReadAhead) {
  constexpr std::int64_t bytes = 4 << 20, part = 64 << 10;
  std::vector<char> memory(bytes);
  std::uint32_t number = 1;  // contents that no file system compresses
  for (char& byte : memory) byte = static_cast<char>((number = number * 1664525u + 1013904223u) >> 24);
  const std::vector<char> written = memory;
  files_.open(folder_ / "a", OpenMode::create_new)->write(0, memory.data(), bytes);
  const auto from_disk = [&] {
    test::drop_from_page_cache(folder_.path());
    const std::int64_t before = test::bytes_from_disk();
    for (int reader = 0; reader < 2; ++reader) {
      const auto file = files_.open(folder_ / "a", OpenMode::read, Caching::shared);
      EXPECT_FALSE(file->direct());
      EXPECT_EQ(file->direct_refusal(), "");
      std::fill(memory.begin(), memory.end(), '\0');
      file->read(0, memory.data(), part);
      EXPECT_TRUE(std::equal(written.begin(), written.begin() + part, memory.begin()));
    }
    return test::bytes_from_disk() - before;
  };
  // Pages of the program itself may be read too, so that the least of some attempts counts.
  std::int64_t least = from_disk();
  for (int attempt = 0; attempt < 4 && least > part; ++attempt) least = std::min(least, from_disk());
  if (least < part) GTEST_SKIP() << folder_.path() << " is on no disk whose reads /proc/self/io counts";
  EXPECT_LE(least, part + part / 2);
}

// Aligned and unaligned transfers, with and without the page cache, on one file: each reads what another has
// written.
TEST_F(FileSystemTest, DirectAndBufferedAgree) {
  const auto direct = files_.open(folder_ / "a", OpenMode::create_new, Caching::direct);
  const auto buffered = files_.open(folder_ / "a", OpenMode::update);
  const auto host = make_host_resource(Tier::host);
  AlignedBuffer memory(*host, 65536, Category::workspace, "test");
  auto* bytes = static_cast<unsigned char*>(memory.data());
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 65536; ++i) bytes[i] = static_cast<unsigned char>(i * 7 + round + i / 256);
    const std::vector<unsigned char> expected(bytes, bytes + 65536);
    File& writer = round % 2 == 0 ? *direct : *buffered;
    File& reader = round % 2 == 0 ? *buffered : *direct;
    const std::int64_t shift = round < 2 ? 0 : 3;
    writer.write(shift, bytes, 65536);
    std::fill(bytes, bytes + 65536, 0);
    reader.read(shift, bytes, 65536);
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), bytes)) << "round " << round;
  }
  EXPECT_EQ(direct->size(), 65539);
}

// An archive can contain a pipe; without a writer, opening it would wait for ever.
TEST_F(FileSystemTest, OpensRegularFilesOnlyAndAtOnce) {
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink(folder_ / "pipe", folder_ / "link");
  for (const std::string& path : {folder_ / "pipe", folder_ / "link", std::string("/dev/null")}) {
    for (const OpenMode mode : {OpenMode::read, OpenMode::update}) {
      EXPECT_THAT(failure_of([&] { files_.open(path, mode); }, EINVAL),
                  HasSubstr("of '" + path + "' failed: it is a pipe, a socket or a device"));
    }
  }
  EXPECT_THAT(failure_of([&] { files_.open(folder_.path(), OpenMode::read); }, EISDIR),
              AllOf(HasSubstr("opening for reading"), HasSubstr("name a file")));
  const auto file = files_.open(folder_ / "a", OpenMode::create_new);
  EXPECT_EQ(::fcntl(file->native()->buffered, F_GETFL) & O_NONBLOCK, 0);
}

TEST_F(FileSystemTest, ReadsNoLargerFileThanItMayBe) {
  files_.open(folder_ / "a", OpenMode::create_new)->truncate(std::int64_t{6} << 30);  // uses no space
  EXPECT_THAT(failure_of([&] { files_.read_file(folder_ / "a"); }, EFBIG),
              HasSubstr("it has 6442450944 B, and such a file has 1073741824 B at most"));
  files_.open(folder_ / "a", OpenMode::update)->truncate(5);
  EXPECT_THAT(failure_of([&] { files_.read_file(folder_ / "a", 4); }, EFBIG), HasSubstr("at most"));
  EXPECT_EQ(files_.read_file(folder_ / "a", 5).size(), 5u);
}

// If others may write to the folder, they could place a link under a known name, and its target would be
// overwritten.
TEST_F(FileSystemTest, FilesAreReplacedByOnesOfRandomNames) {
  const std::string path = folder_ / "latest";
  const std::string one = temporary_name(path), two = temporary_name(path);
  EXPECT_NE(one, two);
  EXPECT_TRUE(one.starts_with(path + ".new-"));
  EXPECT_TRUE(is_temporary_name(one));
  for (const char* other :
       {"latest", "latest.new-", "latest.new-0123456789abcde", "latest.new-0123456789abcdeg", "latest.tmp",
        "0123456789abcdef", "step-00000001.0123456789abcdef.tmp"}) {
    EXPECT_FALSE(is_temporary_name(other)) << other;
  }
  files_.replace_file(folder_ / "victim", "whole");
  std::filesystem::create_symlink(folder_ / "victim", path + ".tmp");
  std::filesystem::create_symlink(folder_ / "none", folder_ / "dangling");
  files_.replace_file(path, "new");
  EXPECT_EQ(files_.read_file(folder_ / "victim"), "whole");
  EXPECT_THAT(failure_of([&] { files_.open(folder_ / "dangling", OpenMode::create_new); }, EEXIST),
              HasSubstr("creation of"));
  FaultyFileSystem faulty(files_);
  for (const FileOperation operation : {FileOperation::write, FileOperation::sync, FileOperation::rename}) {
    faulty.inject({.operation = operation, .code = EIO});
    EXPECT_THROW(faulty.replace_file(path, "newer"), IoError);
    for (const detail::DirectoryEntry& entry : files_.list(folder_.path())) {
      EXPECT_FALSE(is_temporary_name(entry.name)) << entry.name;
    }
    EXPECT_EQ(files_.read_file(path), "new");
  }
}

TEST_F(FileSystemTest, Names) {
  const std::string deep = folder_ / "b/c/d";
  files_.create_directories(deep);
  files_.create_directories(deep + "/");
  EXPECT_FALSE(files_.create_directory(deep));
  files_.replace_file(deep + "/x", "one");
  files_.replace_file(deep + "/x", "two");
  files_.replace_file(folder_ / "a", "");
  EXPECT_EQ(files_.read_file(deep + "/x"), "two");
  EXPECT_THAT(files_.list(deep), ::testing::SizeIs(1)) << "nothing temporary is left";
  std::filesystem::create_directory_symlink(deep, folder_ / "link");
  std::vector<std::string> names;
  for (const auto& entry : files_.list(folder_.path()))
    names.push_back(entry.name + (entry.is_directory ? "/" : ""));
  EXPECT_THAT(names, ElementsAre("a", "b/", "link"));
  EXPECT_EQ(files_.remove_all(folder_ / "link"), 1);
  EXPECT_TRUE(files_.exists(deep + "/x")) << "a link is removed, not what it points to";
  EXPECT_THAT(failure_of([&] { files_.remove(folder_ / "b"); }, ENOTEMPTY),
              HasSubstr("the folder is not empty"));
  EXPECT_EQ(files_.remove_all((folder_ / "b") + "/"), 4);
  EXPECT_EQ(files_.remove_all(folder_ / "b"), 0);
  files_.rename(folder_ / "a", folder_ / "z");
  EXPECT_FALSE(files_.status(folder_ / "a"));
  EXPECT_THAT(failure_of([&] { files_.rename(folder_ / "a", folder_ / "y"); }, ENOENT),
              ContainsRegex("renaming to '.*y' of '.*a' failed"));
  EXPECT_THAT(failure_of([&] { files_.create_directory(folder_ / "z"); }, EEXIST),
              HasSubstr("making the folder"));
  EXPECT_THAT(failure_of([&] { files_.create_directory(folder_ / "z/y"); }, ENOTDIR),
              HasSubstr("a part of the path is not a folder"));
  EXPECT_THAT(failure_of([&] { files_.list(folder_ / "y"); }, ENOENT), HasSubstr("listing of"));
  EXPECT_THAT(failure_of([&] { files_.size(folder_ / "y"); }, ENOENT), HasSubstr("looking up of"));
  EXPECT_THAT(failure_of([&] { files_.sync_directory(folder_ / "y"); }, ENOENT),
              HasSubstr("sync of the folder"));
  EXPECT_THAT(failure_of([&] { files_.space(folder_ / "y"); }, ENOENT), HasSubstr("free space"));
  files_.sync_directory(folder_.path());
  const detail::SpaceInfo space = files_.space(folder_.path());
  EXPECT_GT(space.free_bytes, 0);
  EXPECT_GE(space.total_bytes, space.free_bytes);
}

TEST(Paths, Parents) {
  for (const auto& [path, parent] : std::vector<std::pair<std::string, std::string>>{{"a", "."},
                                                                                     {"a/", "."},
                                                                                     {"a/b", "a"},
                                                                                     {"a//b//", "a"},
                                                                                     {"/a", "/"},
                                                                                     {"/", "/"},
                                                                                     {"", "."},
                                                                                     {"/a/b", "/a"}}) {
    EXPECT_EQ(detail::parent_path(path), parent) << path;
  }
  EXPECT_EQ(join_path("a", "b"), "a/b");
  EXPECT_EQ(join_path("a/", "b"), "a/b");
  EXPECT_EQ(join_path("", "b"), "b");
}

// The kernel transfers less than requested, is interrupted, or fails half way.
TEST_F(FileSystemTest, ShortTransfersAreResumed) {
  std::atomic<int> calls{0};
  const auto files = make_posix_file_system([&](IoCall call, std::int64_t bytes) -> std::int64_t {
    if (call != IoCall::read && call != IoCall::write) return bytes;
    const int number = ++calls;
    if (number % 3 == 0) return -EINTR;
    return (bytes + 1) / 2;
  });
  const auto host = make_host_resource(Tier::host);
  AlignedBuffer memory(*host, 40'960, Category::workspace, "test");
  auto* bytes = static_cast<unsigned char*>(memory.data());
  for (const Caching caching : {Caching::buffered, Caching::direct}) {
    const auto file = files->open(folder_ / "a", OpenMode::create_or_truncate, caching);
    for (const std::int64_t offset : {0, 5}) {
      for (int i = 0; i < 40'960; ++i) bytes[i] = static_cast<unsigned char>(i * 3 + i / 256 + offset);
      const std::vector<unsigned char> expected(bytes, bytes + 40'960);
      file->write(offset, bytes, 40'960);
      std::fill(bytes, bytes + 40'960, 0);
      file->read(offset, bytes, 40'960);
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), bytes));
    }
  }
  EXPECT_GT(calls.load(), 50);
}

TEST_F(FileSystemTest, FailuresOfTheSystem) {
  IoCall failing = IoCall::write;
  int code = EIO;
  std::int64_t calls = 0;
  const auto files = make_posix_file_system([&](IoCall call, std::int64_t bytes) -> std::int64_t {
    if (call != failing) return bytes;
    return ++calls == 1 && (call == IoCall::read || call == IoCall::write) ? bytes / 2 : -code;
  });
  const auto file = files->open(folder_ / "a", OpenMode::create_new);
  const std::string data(1000, 'x');
  EXPECT_THAT(failure_of([&] { put(*file, 24, data); }, EIO),
              AllOf(HasSubstr("write of bytes 524 to 1023 (500 B) of '" + (folder_ / "a") + "' failed"),
                    HasSubstr("Input/output error"), HasSubstr("do not trust what the disk holds")));
  code = ENOSPC;
  EXPECT_THAT(
      failure_of([&] { put(*file, 0, data); }, ENOSPC),
      AllOf(HasSubstr("No space left on device"), ContainsRegex("1000 B are needed, [0-9]+ B are free")));
  code = 0;  // every write transfers nothing
  EXPECT_THAT(failure_of([&] { put(*file, 0, data); }, EIO), HasSubstr("write of bytes 0 to 999"));
  failing = IoCall::sync;
  code = EIO;
  EXPECT_THAT(failure_of([&] { file->sync(); }, EIO), HasSubstr("sync of '"));
  EXPECT_THAT(failure_of([&] { files->sync_directory(folder_.path()); }, EIO),
              HasSubstr("sync of the folder of"));
  code = EOPNOTSUPP;  // some network file systems cannot sync folders
  files->sync_directory(folder_.path());
  failing = IoCall::preallocate;
  code = ENOSPC;
  EXPECT_THAT(failure_of([&] { file->preallocate(1 << 20); }, ENOSPC),
              AllOf(HasSubstr("preallocation of bytes 0 to 1048575"), HasSubstr("1048576 B are needed")));
  code = EOPNOTSUPP;
  file->preallocate(1 << 20);
  EXPECT_EQ(file->size(), 1 << 20) << "made longer where space cannot be allocated ahead";
  failing = IoCall::open_direct;
  code = EINVAL;
  const auto refused = files->open(folder_ / "a", OpenMode::update, Caching::direct);
  EXPECT_FALSE(refused->direct());
  EXPECT_THAT(refused->direct_refusal(), AllOf(HasSubstr("refuses direct I/O (Invalid argument)"),
                                               HasSubstr("transfers go through the page cache")));
  put(*refused, 0, "still works");
}

TEST(IoFailureText, SaysWhatToDo) {
  for (const auto& [code, remedy] :
       std::vector<std::pair<int, std::string>>{{EROFS, "the file system is read-only"},
                                                {EACCES, "this user may not"},
                                                {EDQUOT, "the quota of this user"},
                                                {EMFILE, "ulimit -n"},
                                                {ENFILE, "too many open files"},
                                                {EFBIG, "no file of this size"},
                                                {ECANCELED, "it was called off"},
                                                {ESTALE, "removed on its server"},
                                                {ENODEV, "see the system's log"}}) {
    EXPECT_THAT(detail::describe({"write", "a", code, 0, 10}), HasSubstr(remedy));
  }
}

// A real full disk, if the test can create one.
TEST_F(FileSystemTest, FullDisk) {
  const std::string place = folder_ / "mount";
  std::filesystem::create_directories(place);
  if (::mount("tranche-test", place.c_str(), "tmpfs", 0, "size=64k") != 0) {
    GTEST_SKIP()
        << "a small file system cannot be mounted here (not root); FailuresOfTheSystem injects ENOSPC";
  }
  struct Unmount {
    std::string place;
    ~Unmount() { ::umount2(place.c_str(), MNT_DETACH); }
  } unmount{place};
  const auto file = files_.open(place + "/a", OpenMode::create_new);
  EXPECT_THAT(failure_of([&] { file->preallocate(1 << 20); }, ENOSPC), HasSubstr("1048576 B are needed"));
  EXPECT_THAT(failure_of([&] { put(*file, 0, std::string(100'000, 'x')); }, ENOSPC),
              AllOf(HasSubstr("write of bytes 65536 to 99999 (34464 B)"),
                    HasSubstr("34464 B are needed, 0 B are free")));
}

TEST_F(FileSystemTest, InjectedFaults) {
  FaultyFileSystem files(files_);
  const auto file = files.open(folder_ / "a", OpenMode::create_new, Caching::buffered);
  files.inject({.operation = FileOperation::write, .nth = 2, .code = ENOSPC, .done_bytes = 3});
  put(*file, 0, "first");
  EXPECT_THAT(failure_of([&] { put(*file, 5, "second"); }, ENOSPC),
              HasSubstr("write of bytes 8 to 10 (3 B)"));
  put(*file, 8, "!");
  EXPECT_EQ(files_.read_file(folder_ / "a"), "firstsec!");
  files.inject({.operation = FileOperation::rename, .times = -1, .code = EROFS, .path_contains = "target"});
  EXPECT_THAT(failure_of([&] { files.rename(folder_ / "a", folder_ / "target"); }, EROFS),
              HasSubstr("read-only"));
  files.rename(folder_ / "a", folder_ / "c");
  EXPECT_EQ(files.count(FileOperation::write), 3);
  files.clear();
  files.rename(folder_ / "c", folder_ / "target");
  files.set_free_bytes(12);
  EXPECT_EQ(files.space(folder_.path()).free_bytes, 12);
}

TEST(AlignedBufferTest, AlignedAndAccounted) {
  const auto host = make_host_resource(Tier::host);
  StatisticsResource counted(*host);
  for (const std::int64_t bytes : {0, 1, 4095, 4096, 5'000'000}) {
    AlignedBuffer buffer(counted, bytes, Category::workspace, "test");
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % detail::io_alignment, 0u);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(counted.bytes().current, aligned_bytes(AlignedBuffer::requested_bytes(bytes)));
    AlignedBuffer moved = std::move(buffer);
    EXPECT_FALSE(buffer);
    EXPECT_EQ(buffer.data(), nullptr);
    EXPECT_TRUE(moved);
  }
  EXPECT_EQ(counted.bytes().current, 0);
  const auto device = make_host_resource(Tier::device);
  try {
    AlignedBuffer buffer(*device, 1, Category::workspace, "snapshot");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.message(),
                HasSubstr("'snapshot' is a buffer for file I/O, which needs memory of the tier host"));
  }
}

}  // namespace
}  // namespace tranche
