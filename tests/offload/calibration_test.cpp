// Calibration takes little time, its result is stored, and its failures never stop a run.
#include "offload/calibration.h"

#include <gmock/gmock.h>

#include <cerrno>

#include "tests/offload/faulty_file_system.h"
#include "tests/offload/test_folder.h"
#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

using detail::BlockIoCalibration;
using detail::BlockIoEngine;
using detail::calibrate_block_io;
using detail::posix_file_system;
using testing::FaultyFileSystem;
using testing::FileOperation;
using ::testing::HasSubstr;
using testing::TestFolder;

class CalibrationTest : public ::testing::Test {
 protected:
  CalibrationTest() {
    request_.directory = folder_.path();
    request_.memory_path = folder_ / "calibration.json";
    request_.file_bytes = 1 << 20;
    request_.seconds_per_candidate = 0.001;
  }
  TestFolder folder_;
  std::unique_ptr<MemoryResource> host_ = make_host_resource(Tier::host);
  detail::CalibrationRequest request_;
};

TEST_F(CalibrationTest, MeasuresOnceAndRemembers) {
  const BlockIoCalibration first = calibrate_block_io(request_, *host_);
  EXPECT_FALSE(first.remembered);
  EXPECT_NE(first.options.engine, BlockIoEngine::automatic);
  ASSERT_GT(first.candidates.size(), 3u);
  EXPECT_EQ(first.candidates[0].block_bytes, first.options.block_bytes);
  EXPECT_EQ(first.candidates[0].depth, first.options.depth);
  for (const auto& candidate : first.candidates) {
    EXPECT_GT(candidate.write_bytes_per_second, 0);
    EXPECT_GT(candidate.read_bytes_per_second, 0);
  }
  std::vector<std::string> names;
  for (const auto& entry : posix_file_system().list(folder_.path())) names.push_back(entry.name);
  EXPECT_THAT(names, ::testing::ElementsAre("calibration.json")) << "nothing else is left";

  const BlockIoCalibration second = calibrate_block_io(request_, *host_);
  EXPECT_TRUE(second.remembered);
  EXPECT_EQ(second.options.block_bytes, first.options.block_bytes);
  EXPECT_EQ(second.options.depth, first.options.depth);
  EXPECT_EQ(second.direct, first.direct);
  EXPECT_EQ(second.candidates.size(), first.candidates.size());

  EXPECT_EQ(second.options.engine, first.options.engine);

  // Other engines have a separate measurement.
  if (detail::make_block_io()->engine() == BlockIoEngine::uring) {
    request_.engine = BlockIoEngine::threads;
    const BlockIoCalibration threads = calibrate_block_io(request_, *host_);
    EXPECT_FALSE(threads.remembered);
    EXPECT_EQ(threads.options.engine, BlockIoEngine::threads);
    EXPECT_EQ(2 * threads.candidates.size(), first.candidates.size());
    request_.engine = BlockIoEngine::automatic;
    EXPECT_TRUE(calibrate_block_io(request_, *host_).remembered);
  }
}

TEST_F(CalibrationTest, ReadsAndWritesShareTheDisk) {
  const detail::DiskRates rates = detail::measure_both_ways(request_, {.hook = {}}, 1, 0.01, *host_);
  EXPECT_GT(rates.read_bytes_per_second, 0);
  EXPECT_GT(rates.write_bytes_per_second, 0);
  EXPECT_GE(rates.slowed, 1);
  EXPECT_TRUE(posix_file_system().list(folder_.path()).empty()) << "both files are removed";

  // Reads of 1 MiB/s and writes of twice that would take 1.5 s after each other. If the disk does both in
  // 1 s, each rate is 1.5 times as high.
  const detail::DiskRates together = detail::rates_of(1 << 20, 1, 0.5, 1, 3);
  EXPECT_DOUBLE_EQ(together.read_bytes_per_second, 1.5 * (1 << 20));
  EXPECT_DOUBLE_EQ(together.write_bytes_per_second, 3 * (1 << 20));
  EXPECT_DOUBLE_EQ(together.slowed, 3);
  EXPECT_DOUBLE_EQ(detail::rates_of(1, 1, 1, 2, 1.5).slowed, 1) << "a disk is not faster beside other work";
}

TEST_F(CalibrationTest, DamagedMemoryIsReplaced) {
  for (const std::string text :
       {"", "{", "[]", "{\"schema\": 2, \"results\": {}}", "{\"schema\": 1}", "\xff\xff"}) {
    posix_file_system().replace_file(request_.memory_path, text);
    EXPECT_FALSE(calibrate_block_io(request_, *host_).remembered) << text;
    EXPECT_TRUE(calibrate_block_io(request_, *host_).remembered) << text;
  }
  BlockIoCalibration calibration;
  for (
      const std::string entry :
      {"7", "{}", R"({"direct": true, "candidates": []})",
       R"({"direct": true, "candidates": [{"depth": 1}]})",
       R"({"direct": true, "candidates": [{"engine": "threads", "block_bytes": 1, "depth": 1, "write_bytes_per_second": 1,
            "read_bytes_per_second": 1}]})",
       R"({"direct": true, "candidates": [{"engine": "mmap", "block_bytes": 4096, "depth": 1,
            "write_bytes_per_second": 1, "read_bytes_per_second": 1}]})"}) {
    const std::string text = R"({"schema": 1, "results": {"key": )" + entry + "}}";
    EXPECT_FALSE(detail::recall_calibration(text, "key", calibration)) << text;
  }
}

TEST_F(CalibrationTest, FailuresLeaveNothingBehind) {
  FaultyFileSystem files(posix_file_system());
  files.inject({.operation = FileOperation::preallocate, .code = ENOSPC});
  EXPECT_THROW(calibrate_block_io(request_, *host_, files), IoError);
  files.inject({.operation = FileOperation::write, .nth = 5, .code = EIO});
  EXPECT_THROW(calibrate_block_io(request_, *host_, files), IoError);
  files.inject({.operation = FileOperation::write, .nth = 2, .code = EIO});
  EXPECT_THROW(detail::measure_both_ways(request_, {.hook = {}}, 1, 0.01, *host_, files), IoError);
  EXPECT_TRUE(posix_file_system().list(folder_.path()).empty());
  request_.file_bytes = 100;
  try {
    calibrate_block_io(request_, *host_);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.message(), HasSubstr("calibration with 100 B: at least 4096"));
  }
  request_.directory = folder_ / "nowhere";
  request_.file_bytes = 1 << 20;
  EXPECT_THROW(calibrate_block_io(request_, *host_), IoError);
}

}  // namespace
}  // namespace tranche
