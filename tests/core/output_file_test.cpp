// Output files that users name: regular files are replaced as a whole, other files never.
#include "core/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tranche/core/error.h"

namespace tranche {
namespace {

using detail::OutputFile;
using detail::require_output_file;
using detail::write_output_file;
namespace fs = std::filesystem;

class OutputFileTest : public testing::Test {
 protected:
  OutputFileTest() {
    std::string pattern = (fs::temp_directory_path() / "tranche-output-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    folder_ = pattern;
  }
  ~OutputFileTest() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string put(const std::string& name, const std::string& content) const {
    std::ofstream(path(name)) << content;
    return path(name);
  }
  std::string content(const std::string& name) const {
    std::ifstream file(path(name));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::size_t names() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
  /// Creates a FIFO with a reader.
  int reader_of(const std::string& name) const {
    EXPECT_EQ(::mkfifo(path(name).c_str(), 0600), 0);
    return ::open(path(name).c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  }
  template <class Call>
  static IoError refused(const Call& call) {
    try {
      call();
    } catch (const IoError& error) {
      return error;
    }
    ADD_FAILURE() << "nothing was refused";
    return {"", 0};
  }
  fs::path folder_;
};

TEST_F(OutputFileTest, AFileIsReplacedAsAWholeWithItsPermissions) {
  const std::string file = put("r", "a much longer old content");
  ::chmod(file.c_str(), 0640);
  {
    OutputFile writer(file);
    writer.write(std::string(100000, 'x'));
    writer.write("end");
    EXPECT_EQ(content("r"), "a much longer old content") << "until all of it is there";
    writer.commit();
  }
  EXPECT_EQ(content("r"), std::string(100000, 'x') + "end");
  struct stat status {};
  ASSERT_EQ(::stat(file.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0640u);
  EXPECT_EQ(names(), 1u);
  write_output_file(path("new"), "");
  EXPECT_TRUE(fs::exists(path("new")));
}

TEST_F(OutputFileTest, WithoutCommitTheEarlierFileStays) {
  const std::string file = put("r", "old");
  {
    OutputFile writer(file);
    writer.write(std::string(100000, 'x'));
  }
  EXPECT_EQ(content("r"), "old");
  EXPECT_EQ(names(), 1u);
}

TEST_F(OutputFileTest, SymbolicLinksStayAndTheirTargetsAreReplaced) {
  fs::create_directory(path("a"));
  put("a/target", "old");
  fs::create_symlink("a/target", path("first"));
  fs::create_symlink(path("first"), path("second"));
  write_output_file(path("second"), "new");
  EXPECT_TRUE(fs::is_symlink(path("first")) && fs::is_symlink(path("second")));
  EXPECT_EQ(content("a/target"), "new");
  EXPECT_FALSE(fs::is_symlink(path("a/target")));
  fs::create_symlink("a/missing", path("third"));
  require_output_file(path("third"));
  EXPECT_FALSE(fs::exists(path("a/missing")));
  write_output_file(path("third"), "made");
  EXPECT_TRUE(fs::is_symlink(path("third")));
  EXPECT_EQ(content("a/missing"), "made");
  fs::create_symlink("circle", path("circle"));
  EXPECT_EQ(refused([&] { write_output_file(path("circle"), "x"); }).code(), ELOOP);
  EXPECT_EQ(names(), 5u) << "nothing beside";
}

TEST_F(OutputFileTest, AFifoIsWrittenToAndStays) {
  const int reader = reader_of("fifo");
  ASSERT_GE(reader, 0);
  require_output_file(path("fifo"));
  write_output_file(path("fifo"), "report");
  std::array<char, 32> text{};
  EXPECT_EQ(::read(reader, text.data(), text.size()), 6);
  EXPECT_STREQ(text.data(), "report");
  ::close(reader);
  EXPECT_TRUE(fs::is_fifo(path("fifo")));
  EXPECT_EQ(names(), 1u);
}

TEST_F(OutputFileTest, AFifoThatNobodyReadsIsRefusedAndNotWaitedFor) {
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  require_output_file(path("fifo"));  // a reader may open it before the end
  const IoError error = refused([&] { write_output_file(path("fifo"), "x"); });
  EXPECT_EQ(error.code(), ENXIO);
  EXPECT_NE(error.message().find("fifo' cannot be written: nobody reads this FIFO"), std::string::npos);
  EXPECT_TRUE(fs::is_fifo(path("fifo")));
}

TEST_F(OutputFileTest, DevicesAreWrittenToAndStay) {
  // Only device files that this user could not replace are named.
  const auto device = [&](const char* name, unsigned minor) {
    const bool made = ::mknod(path(name).c_str(), S_IFCHR | 0666, makedev(1, minor)) == 0;
    return made || ::geteuid() == 0 ? path(name) : std::string("/dev/") + name;
  };
  const std::string null = device("null", 3), full = device("full", 7);
  if (!fs::exists(null)) GTEST_SKIP() << "no devices may be made here";
  const std::size_t before = names();
  require_output_file(null);
  require_output_file(full);
  try {
    write_output_file(null, "x");
  } catch (const IoError& error) {
    EXPECT_EQ(error.code(), EACCES) << "of a file system without devices";
  }
  const int code = refused([&] { write_output_file(full, "x"); }).code();
  EXPECT_TRUE(code == ENOSPC || code == EACCES) << code;
  EXPECT_TRUE(fs::is_character_file(null) && fs::is_character_file(full));
  EXPECT_EQ(names(), before);
}

TEST_F(OutputFileTest, WhatStandardOutputGoesToIsWrittenOn) {
  const std::string log = put("log", "");
  const int own = ::dup(STDOUT_FILENO);
  const int file = ::open(log.c_str(), O_WRONLY | O_CLOEXEC);
  std::fflush(stdout);
  ::dup2(file, STDOUT_FILENO);
  std::printf("printed\n");
  require_output_file("/proc/self/fd/1");
  write_output_file("/proc/self/fd/1", "report\n");
  write_output_file(log, "by its name\n");
  std::printf("after\n");
  std::fflush(stdout);
  ::dup2(own, STDOUT_FILENO);
  ::close(own);
  ::close(file);
  EXPECT_EQ(content("log"), "printed\nreport\nby its name\nafter\n");
}

TEST_F(OutputFileTest, RefusalsNameThePathAndTheReason) {
  const auto texts = [&](const std::string& name) {
    const IoError written = refused([&] { write_output_file(path(name), "x"); });
    const IoError asked = refused([&] { require_output_file(path(name)); });
    EXPECT_EQ(written.code(), asked.code());
    EXPECT_EQ(written.message(), asked.message());
    EXPECT_EQ(written.message().find("'" + path(name) + "' cannot be written: "), 0u);
    return written.code();
  };
  EXPECT_EQ(texts("none/r"), ENOENT);
  put("file", "");
  EXPECT_EQ(texts("file/r"), ENOTDIR);
  fs::create_directory(path("folder"));
  EXPECT_EQ(texts("folder"), EISDIR);
  fs::create_symlink("folder", path("link"));
  EXPECT_EQ(texts("link"), EISDIR);
  EXPECT_EQ(names(), 3u);
}

TEST_F(OutputFileTest, TheTemporaryFileHasARandomNameAndIsNotFollowedThroughALink) {
  const auto temporary = [&] {
    const OutputFile writer(path("r"));
    EXPECT_EQ(names(), 1u);
    return fs::directory_iterator(folder_)->path().filename().string();
  };
  const std::string first = temporary(), second = temporary();
  EXPECT_NE(first, second);
  EXPECT_TRUE(first.starts_with("r.") && first.ends_with(".part")) << first;
  EXPECT_EQ(first.size(), std::string("r.0123456789abcdef.part").size());
  // Predictable names are not used for temporary files.
  const std::string victim = put("victim", "precious");
  fs::create_symlink(victim, path("r." + std::to_string(::getpid()) + ".part"));
  write_output_file(path("r"), "x");
  EXPECT_EQ(content("victim"), "precious");
}

}  // namespace
}  // namespace tranche
