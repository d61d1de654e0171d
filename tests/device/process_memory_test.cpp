// Reads the kernel's files about memory.
#include "device/process_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

namespace tranche {
namespace {

using detail::available_memory;
using detail::parse_available_memory;
using detail::parse_group_memory;
using detail::parse_process_status;
using detail::process_memory;
using detail::ProcessMemory;

constexpr std::int64_t unbounded = std::numeric_limits<std::int64_t>::max();

/// A folder that replaces "/", with files written by a test.
class FakeRoot {
 public:
  FakeRoot() {
    path_ = testing::TempDir() + "/tranche_root_" +
            testing::UnitTest::GetInstance()->current_test_info()->name() + "." + std::to_string(::getpid());
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path file = path_ + "/" + name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(ProcessMemory, ReadsTheKernelsLines) {
  const ProcessMemory memory = parse_process_status(
      "VmHWM:\t  9 kB\nRssAnon:\t    1234 kB\nRssFile:\t       5 kB\nRssShmem:\t 0 kB\n");
  EXPECT_EQ(memory.anonymous, 1234 * 1024);
  EXPECT_EQ(memory.file, 5 * 1024);
  EXPECT_EQ(memory.shared, 0);
  EXPECT_EQ(parse_process_status("Name: x\n").anonymous, 0);
  EXPECT_EQ(parse_process_status("RssAnon:").anonymous, 0);
}

TEST(ProcessMemory, SeesPagesThatWereTouched) {
  const std::int64_t before = process_memory().anonymous;
  ASSERT_GT(before, 0);
  constexpr std::size_t bytes = std::size_t{64} << 20;
  std::vector<char> touched(bytes, 1);
  EXPECT_GT(process_memory().anonymous, before + static_cast<std::int64_t>(bytes) / 2);
  EXPECT_EQ(touched[bytes / 2], 1);
}

constexpr const char* meminfo =
    "MemTotal:       16384 kB\nMemFree:          100 kB\nMemAvailable:    8192 kB\n"
    "Buffers:           20 kB\nCached:            30 kB\nSwapCached:         7 kB\n";

TEST(AvailableMemory, IsWhatMeminfoSays) {
  EXPECT_EQ(parse_available_memory(meminfo), 8192 * 1024);
  EXPECT_EQ(parse_available_memory("MemFree: 100 kB\nBuffers: 20 kB\nCached: 30 kB\nSwapCached: 7 kB\n"),
            150 * 1024)
      << "kernels that do not say it themselves";
  EXPECT_EQ(parse_available_memory("MemFree: 100 kB\n"), 100 * 1024);
  EXPECT_EQ(parse_available_memory("NotMemAvailable: 5 kB\n"), unbounded);
  EXPECT_EQ(parse_available_memory("MemAvailable:"), unbounded);
  EXPECT_EQ(parse_available_memory(""), unbounded);
}

TEST(AvailableMemory, AGroupLeavesItsLimitLessWhatCannotBeDropped) {
  EXPECT_EQ(parse_group_memory("1000\n", "600\n", "anon 500\ninactive_file 100\nactive_file 7\n"), 500);
  EXPECT_EQ(parse_group_memory("1000\n", "600\n", ""), 400);
  EXPECT_EQ(parse_group_memory("1000\n", "600\n", "inactive_file 10\ntotal_inactive_file 100\n"), 500)
      << "version 1 adds the groups below";
  EXPECT_EQ(parse_group_memory("1000\n", "1700\n", ""), 0) << "a limit that was lowered";
  EXPECT_EQ(parse_group_memory("1000\n", "50\n", "inactive_file 100\n"), 1000);
  EXPECT_EQ(parse_group_memory("0\n", "0\n", ""), 0);
  EXPECT_EQ(parse_group_memory("max\n", "600\n", ""), unbounded);
  EXPECT_EQ(parse_group_memory("9223372036854771712\n", "600\n", ""), unbounded) << "version 1's none";
  EXPECT_EQ(parse_group_memory("99999999999999999999\n", "600\n", ""), unbounded);
  EXPECT_EQ(parse_group_memory("", "600\n", ""), unbounded);
}

TEST(AvailableMemory, WithoutGroupsTheMachineBounds) {
  const FakeRoot root;
  EXPECT_EQ(available_memory(root.path()).bytes, unbounded);
  root.write("proc/meminfo", meminfo);
  EXPECT_EQ(available_memory(root.path()).bytes, 8192 * 1024);
  root.write("proc/self/cgroup", "0::/\n");
  EXPECT_EQ(available_memory(root.path()).bytes, 8192 * 1024);
}

TEST(AvailableMemory, TheTightestGroupAboveBounds) {
  const FakeRoot root;
  root.write("proc/meminfo", meminfo);
  root.write("proc/self/cgroup", "0::/slurm/job_7/step_0\n");
  root.write("sys/fs/cgroup/slurm/job_7/step_0/memory.max", "max\n");
  root.write("sys/fs/cgroup/slurm/job_7/step_0/memory.current", "1\n");
  EXPECT_EQ(available_memory(root.path()).bytes, 8192 * 1024);
  root.write("sys/fs/cgroup/slurm/job_7/memory.max", "1048576\n");
  root.write("sys/fs/cgroup/slurm/job_7/memory.current", "48576\n");
  root.write("sys/fs/cgroup/slurm/job_7/memory.stat", "anon 1\ninactive_file 576\n");
  EXPECT_EQ(available_memory(root.path()).bytes, 1000576);
  root.write("sys/fs/cgroup/slurm/job_7/step_0/memory.max", "2001\n");
  EXPECT_EQ(available_memory(root.path()).bytes, 2000);
  root.write("sys/fs/cgroup/slurm/memory.max", "1500\n");
  EXPECT_EQ(available_memory(root.path()).bytes, 1500);
  root.write("proc/meminfo", "MemAvailable: 1 kB\n");
  EXPECT_EQ(available_memory(root.path()).bytes, 1024);
}

TEST(AvailableMemory, SaysWhetherAGroupBounds) {
  const FakeRoot root;
  EXPECT_FALSE(available_memory(root.path()).of_group);
  root.write("proc/meminfo", meminfo);
  root.write("proc/self/cgroup", "0::/job\n");
  root.write("sys/fs/cgroup/job/memory.max", "16777216\n");
  EXPECT_FALSE(available_memory(root.path()).of_group) << "the machine has less";
  root.write("sys/fs/cgroup/job/memory.max", "1048576\n");
  EXPECT_TRUE(available_memory(root.path()).of_group);
}

TEST(AvailableMemory, AContainersRootStandsForItsPathOutside) {
  const FakeRoot root;
  root.write("proc/meminfo", meminfo);
  root.write("proc/self/cgroup", "0::/docker/abc\n");
  root.write("sys/fs/cgroup/memory.max", "5000\n");
  root.write("sys/fs/cgroup/memory.current", "1000\n");
  EXPECT_EQ(available_memory(root.path()).bytes, 4000);
}

TEST(AvailableMemory, VersionOneHasTheMemoryControllersFolder) {
  const FakeRoot root;
  root.write("proc/meminfo", meminfo);
  root.write("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:hugetlb,memory:/batch/7\n0::/\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  root.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "77\n");
  root.write("sys/fs/cgroup/memory/batch/7/memory.limit_in_bytes", "9000\n");
  root.write("sys/fs/cgroup/memory/batch/7/memory.usage_in_bytes", "3000\n");
  root.write("sys/fs/cgroup/memory/batch/7/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n");
  EXPECT_EQ(available_memory(root.path()).bytes, 6500);
  root.write("proc/self/cgroup", "5:cpu,cpuacct:/batch/7\n0::/\n");
  EXPECT_EQ(available_memory(root.path()).bytes, 8192 * 1024) << "another controller's path is not memory's";
}

TEST(AvailableMemory, IsSaidOnThisMachine) {
  if (!std::filesystem::exists("/proc/meminfo")) GTEST_SKIP() << "no /proc/meminfo";
  EXPECT_GT(available_memory().bytes, 0);
  EXPECT_LT(available_memory().bytes, std::int64_t{1} << 50);
}

}  // namespace
}  // namespace tranche
