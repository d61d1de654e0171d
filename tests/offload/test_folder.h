#pragma once
/// An empty folder for one test, which is removed at the end unless the test failed.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace tranche::testing {

/// The test program's folder: one in the build, on a disk rather than in memory. It is found at run time
/// instead of being compiled in, so that builds of one tree in two folders have the same sources for a
/// compiler cache.
inline std::string program_folder() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
}

class TestFolder {
 public:
  explicit TestFolder(const std::string& root = program_folder()) {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    std::string name = std::string(info->test_suite_name()) + "." + info->name();
    for (char& c : name) c = c == '/' ? '_' : c;
    // Cases run in parallel, and two programs may use a build at the same time.
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
