#include "tools/train/spool.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>

#include "tests/tools/temporary.h"
#include "tranche/core/error.h"

namespace tranche::tools {
namespace {

using test::message_of;
using test::TemporaryFolder;
using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

std::string content_of(Spool& spool) {
  std::string text;
  spool.read([&text](std::string_view piece) { text += piece; });
  return text;
}

TEST(Spool, GivesBackWhatWasAddedAndHasNoName) {
  const TemporaryFolder folder;
  Spool spool(folder.path("report.json"));
  EXPECT_TRUE(spool.empty());
  EXPECT_EQ(content_of(spool), "");
  std::string all;
  for (int i = 0; i < 20000; ++i) {
    spool.add(std::to_string(i) + ",");
    all += std::to_string(i) + ",";
  }
  EXPECT_FALSE(spool.empty());
  EXPECT_EQ(content_of(spool), all);
  spool.add("more");
  EXPECT_EQ(content_of(spool), all + "more") << "read and added to again";
  EXPECT_THAT(folder.names(), IsEmpty());
}

/// Sets TMPDIR while it lives.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const char* folder) {
    if (const char* const set = std::getenv("TMPDIR")) before_ = set;
    ::setenv("TMPDIR", folder, 1);
  }
  ~TemporaryDirectory() {
    if (before_) {
      ::setenv("TMPDIR", before_->c_str(), 1);
    } else {
      ::unsetenv("TMPDIR");
    }
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

 private:
  std::optional<std::string> before_;
};

TEST(Spool, SaysWhereNoTemporaryFileCanBeMade) {
  const TemporaryDirectory nowhere("/proc");
  EXPECT_THAT(message_of<ConfigurationError>([] { Spool("/proc/none"); }),
              AllOf(StartsWith("no temporary file can be made for '/proc/none': "),
                    EndsWith("; name a file in a folder where files can be created, or set TMPDIR to "
                             "such a folder")));
}

TEST(Spool, LiesElsewhereWhereThePathIsNoRegularFile) {
  for (const char* path : {"/dev/null", "/proc/none"}) {
    Spool spool(path);
    spool.add("x");
    EXPECT_EQ(content_of(spool), "x");
  }
}

TEST(Spool, WhatCouldNotBeKeptIsToldAtTheEnd) {
  const TemporaryFolder folder;
  Spool spool(folder.path("r"));
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = 100000;
  ::setrlimit(RLIMIT_FSIZE, &limit);
  for (int i = 0; i < 200; ++i) spool.add(std::string(1000, 'x'));
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(message_of<IoError>([&] { content_of(spool); }),
              AllOf(HasSubstr("'" + folder.path("r") + "' is not written"), HasSubstr("File too large")));
}

}  // namespace
}  // namespace tranche::tools
