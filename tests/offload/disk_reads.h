#pragma once
/// Counts the bytes that a disk reads for this process.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace tranche::test {

/// Drops the files of a folder from the page cache.
inline void drop_from_page_cache(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_GE(file, 0) << entry.path();
    EXPECT_EQ(::fdatasync(file), 0) << entry.path();
    EXPECT_EQ(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0) << entry.path();
    ::close(file);
  }
}

/// The bytes that disks have read for this process so far. It stays 0 where files have no disk, as in tmpfs.
inline std::int64_t bytes_from_disk() {
  std::ifstream counters("/proc/self/io");
  std::string name;
  for (std::int64_t value = 0; counters >> name >> value;) {
    if (name == "read_bytes:") return value;
  }
  return 0;
}

}  // namespace tranche::test
