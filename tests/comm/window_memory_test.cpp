#include "comm/window_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

#include "tranche/core/error.h"

namespace tranche {
namespace {

constexpr std::int64_t huge_page = std::int64_t{2} << 20;

std::uintptr_t address(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data);
}

/// The bytes of the mapping at `data` that use huge pages of a file.
std::int64_t mapped_by_huge_pages(const void* data) {
  std::ifstream maps("/proc/self/smaps");
  std::ostringstream wanted;
  wanted << std::hex << address(data) << '-';
  std::string line;
  while (std::getline(maps, line) && line.rfind(wanted.str(), 0) != 0) {
  }
  while (std::getline(maps, line)) {
    std::istringstream words(line);
    std::string key;
    std::int64_t kibibytes = 0;
    if (words >> key >> kibibytes && key == "ShmemPmdMapped:") return kibibytes << 10;
  }
  return -1;
}

/// True if this system provides huge pages for an anonymous file on demand; determined differently from how a
/// window does it.
bool system_has_huge_pages() {
  const int file = memfd_create("probe", MFD_CLOEXEC);
  if (file < 0) return false;
  bool able = false;
  if (ftruncate(file, 2 * huge_page) == 0) {
    void* data = mmap(nullptr, 2 * huge_page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (data != MAP_FAILED) {
      auto* bytes = static_cast<unsigned char*>(data);
      for (std::int64_t i = 0; i < 2 * huge_page; i += 4096) bytes[i] = 1;
      // A block must be aligned in the file as it is in memory; only then can it be mapped as a huge page.
      const std::uintptr_t gap = (address(data) + huge_page - 1) / huge_page * huge_page - address(data);
      if (gap == 0) able = madvise(data, huge_page, 25) == 0;
      munmap(data, 2 * huge_page);
      if (gap != 0) {
        data = mmap(reinterpret_cast<void*>(address(bytes) + gap), huge_page, PROT_READ | PROT_WRITE,
                    MAP_SHARED, file, 0);
        able = data != MAP_FAILED && address(data) % huge_page == 0 && madvise(data, huge_page, 25) == 0;
        if (data != MAP_FAILED) munmap(data, huge_page);
      }
    }
  }
  close(file);
  return able;
}

AllocationRequest request(std::int64_t bytes, Category category = Category::gradients) {
  return {bytes, category, "gradients of h.0"};
}

TEST(WindowMemory, FindsWhatItHasGiven) {
  comm::WindowMemory window(Tier::host);
  ASSERT_TRUE(window.available());
  const auto wanted = request(3 * huge_page + 4097);
  auto* data = static_cast<unsigned char*>(window.allocate(wanted));
  EXPECT_TRUE(std::all_of(data, data + wanted.bytes, [](unsigned char byte) { return byte == 0; }));
  const auto place = window.find(data + 100, 50);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->allocation % huge_page, 0);
  EXPECT_EQ(place->offset, 100);
  EXPECT_EQ(place->bytes, 3 * huge_page + 8192);
  EXPECT_FALSE(window.find(data + wanted.bytes, 8192)) << "past the end";
  const auto outside = request(1 << 20, Category::other);
  void* ordinary = window.allocate(outside);
  EXPECT_FALSE(window.find(ordinary, 1)) << "not what ranks exchange";
  window.deallocate(ordinary, outside);
  window.deallocate(data, wanted);
  EXPECT_FALSE(window.find(data, 1));
}

/// Maps the memory as a peer does: the same bytes, aligned to huge pages, with or without whole blocks.
TEST(WindowMemory, IsReadThroughAnotherMapping) {
  comm::WindowMemory window(Tier::host);
  for (const std::int64_t bytes :
       {std::int64_t{64} << 10, huge_page - 4096, huge_page, 2 * huge_page + 12288, 5 * huge_page}) {
    auto* data = static_cast<unsigned char*>(window.allocate(request(bytes)));
    const std::uintptr_t alignment = bytes >= huge_page ? huge_page : 4096;
    EXPECT_EQ(address(data) % alignment, 0u) << bytes;
    const auto place = window.find(data, bytes);
    ASSERT_TRUE(place) << bytes;
    for (std::int64_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(i * 7 + i / 4096);
    void* mapping = comm::map_window(window.file(), place->allocation, place->bytes, PROT_READ);
    ASSERT_NE(mapping, nullptr) << bytes;
    EXPECT_EQ(address(mapping) % alignment, 0u) << bytes;
    EXPECT_TRUE(std::equal(data, data + bytes, static_cast<const unsigned char*>(mapping))) << bytes;
    munmap(mapping, static_cast<std::size_t>(place->bytes));
    window.deallocate(data, request(bytes));
  }
}

TEST(WindowMemory, TakesHugePagesWhereTheSystemHasThem) {
  if (!system_has_huge_pages()) GTEST_SKIP() << "this system makes no huge pages of shared memory on demand";
  comm::WindowMemory window(Tier::host);
  const std::int64_t before = window.resident_bytes();
  const auto wanted = request(3 * huge_page + 4096);
  auto* data = static_cast<unsigned char*>(window.allocate(wanted));
  EXPECT_EQ(window.resident_bytes() - before, 3 * huge_page);
  EXPECT_EQ(mapped_by_huge_pages(data), 3 * huge_page);
  const auto place = window.find(data, wanted.bytes);
  auto* mapping = static_cast<unsigned char*>(
      comm::map_window(window.file(), place->allocation, place->bytes, PROT_READ));
  int sum = 0;
  for (std::int64_t i = 0; i < wanted.bytes; i += 4096) sum += mapping[i];
  EXPECT_EQ(sum, 0);
  EXPECT_EQ(mapped_by_huge_pages(mapping), 3 * huge_page);
  munmap(mapping, static_cast<std::size_t>(place->bytes));
  window.deallocate(data, wanted);
  EXPECT_EQ(window.resident_bytes(), before) << "freed memory goes back to the system at once";
}

TEST(WindowMemory, SaysWhyAMappingIsRefused) {
  EXPECT_EQ(comm::map_window(-1, 0, 4096, PROT_READ), nullptr);
  EXPECT_EQ(errno, EBADF);
  EXPECT_EQ(comm::map_window(-1, 0, 2 * huge_page, PROT_READ), nullptr);
  EXPECT_EQ(errno, EBADF);
  comm::WindowMemory window(Tier::host);
  try {
    window.allocate(request(std::int64_t{1} << 50));
    FAIL() << "a petabyte was given";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(error.message().find("'gradients of h.0' (gradients) asks for"), std::string::npos)
        << error.message();
    EXPECT_NE(error.message().find("shared with the ranks of this node, which the operating system refused"),
              std::string::npos)
        << error.message();
  }
}

}  // namespace
}  // namespace tranche
