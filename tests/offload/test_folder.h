#pragma once
/// A folder for one test, of its own and empty; removed at the end unless the test has failed.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace tranche::testing {

/// The test program's folder: one of the build, on a disk rather than in memory. Asked for here and not
/// compiled in, so that builds of one tree in two folders have the same sources to a compiler's cache.
inline std::string program_folder() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
}

class TestFolder {
 public:
  explicit TestFolder(const std::string& root = program_folder()) {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    std::string name = std::string(info->test_suite_name()) + "." + info->name();
    for (char& c : name) c = c == '/' ? '_' : c;
    // Cases run side by side, and a build may be used by two programs at once.
    path_ = std::filesystem::path(root) / "tmp" / (name + "." + std::to_string(::getpid()));
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TestFolder() {
    if (::testing::Test::HasFailure()) return;
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  std::string path() const { return path_.string(); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace tranche::testing
