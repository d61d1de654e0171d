#pragma once
/// Helpers for tests of saving.

#include <gtest/gtest.h>

#include <unistd.h>
#include <filesystem>
#include <string>

namespace tranche::test {

/// A folder that is removed with the test.
class Saving : public ::testing::Test {
 protected:
  Saving()
      : folder_(std::filesystem::temp_directory_path() /
                ("tranche_saving_" + std::to_string(::getpid()) + "_" +
                 ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
  }
  ~Saving() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name = {}) const { return (folder_ / name).string(); }

 private:
  std::filesystem::path folder_;
};

}  // namespace tranche::test
