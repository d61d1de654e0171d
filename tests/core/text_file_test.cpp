#include "core/text_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using detail::Pipes;
using detail::read_text_file;
using ::testing::EndsWith;

class TextFile : public ::testing::Test {
 protected:
  TextFile() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~TextFile() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string refusal(const std::string& name, Pipes pipes = Pipes::refused) const {
    return test::message_of<ConfigurationError>([&] { read_text_file(name, "model", pipes, 1000); });
  }

 private:
  std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) / ("text_file_test." + std::to_string(::getpid()));
};

TEST_F(TextFile, IsReadWhole) {
  std::string text(200'000, 'x');
  text += std::string("\0\xff\n", 3);
  std::ofstream(path("a"), std::ios::binary) << text;
  EXPECT_EQ(read_text_file(path("a"), "model"), text);
  std::ofstream(path("empty")).flush();
  EXPECT_EQ(read_text_file(path("empty"), "model"), "");
}

TEST_F(TextFile, RefusalsSayWhy) {
  EXPECT_EQ(refusal(path("none")), "model '" + path("none") + "' cannot be read: No such file or directory");
  EXPECT_THAT(refusal(path(".")), EndsWith("cannot be read: it is a folder"));
  std::ofstream(path("large")) << std::string(1001, 'x');
  EXPECT_THAT(refusal(path("large")),
              EndsWith("it has more than 1000 bytes, the most that is read of such a file"));
  EXPECT_THAT(refusal("/dev/zero"), EndsWith("it is no regular file"));
  EXPECT_THAT(refusal("/dev/zero", Pipes::allowed), ::testing::HasSubstr("it has more than 1000 bytes"));
}

// An archive may contain a pipe under any name. Opening it without a writer would wait for ever.
TEST_F(TextFile, PipesWithoutAWriterDoNotHoldItUp) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(refusal(path("pipe")), EndsWith("it is no regular file"));
}

// A shell's <(command) is such a pipe.
TEST_F(TextFile, PipesAreReadToTheirEndWhereTheyAreAllowed) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  std::jthread writer([&] {
    std::ofstream pipe(path("pipe"));
    pipe << "one " << std::flush;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    pipe << "two";
  });
  EXPECT_EQ(read_text_file(path("pipe"), "configuration", Pipes::allowed), "one two");
}

}  // namespace
}  // namespace tranche
