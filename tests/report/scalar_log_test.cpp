#include "tranche/report/scalar_log.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "tests/core/error_text.h"
#include "tests/offload/test_folder.h"
#include "tranche/core/error.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using tranche::testing::TestFolder;

std::string content_of(const std::filesystem::path& path) {
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

/// The messages in an event file, without the time at the beginning of each.
std::vector<std::string> events_of(const std::filesystem::path& path) {
  const std::string all = content_of(path);
  std::vector<std::string> events;
  for (std::size_t at = 0; at < all.size();) {
    std::uint64_t length = 0;
    std::memcpy(&length, all.data() + at, sizeof length);
    const std::string record = all.substr(at + 12, length);
    EXPECT_EQ(record[0], '\x09') << "field 1, eight bytes";
    events.push_back(record.substr(9));
    at += 12 + length + 4;
  }
  return events;
}

std::vector<std::filesystem::path> files_of(const std::string& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

TEST(TensorboardLog, WritesEventsAsTensorFlowDoes) {
  const TestFolder parent;
  const std::string folder = parent.path() + "/runs/job";
  const auto log = make_tensorboard_log(folder);
  log->add(300, std::vector<Scalar>{{"Train/Samples/lr", 0.5}, {"a", -2}});
  const auto files = files_of(folder);
  ASSERT_EQ(files.size(), 1u);
  EXPECT_THAT(files[0].filename().string(), HasSubstr("tfevents"));
  using namespace std::string_literals;
  // Every event file of TensorFlow begins with the length of the first record and its checksum.
  EXPECT_EQ(content_of(files[0]).substr(0, 12), "\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22"s);
  EXPECT_THAT(events_of(files[0]), ElementsAre("\x1a\x0d"s + "brain.Event:2", "\x3a\x02\x08\x01"s,
                                               "\x10\xac\x02\x2a\x23"s  // step 300, a summary of 35 bytes
                                               "\x0a\x17\x0a\x10Train/Samples/lr\x15\0\0\0\x3f"
                                               "\x0a\x08\x0a\x01"
                                               "a\x15\0\0\0\xc0"s));
}

TEST(TensorboardLog, ARunThatGoesOnHidesWhatCameBehind) {
  const TestFolder folder;
  make_tensorboard_log(folder.path())->add(8, std::vector<Scalar>{{"a", 1}});
  (void)make_tensorboard_log(folder.path(), 5);
  const auto files = files_of(folder.path());
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(events_of(files[1])[1], "\x10\x06\x3a\x02\x08\x01") << "a session that starts with step 6";
}

TEST(CsvLog, HasAFileATagAsDeepSpeedNamesThem) {
  const TestFolder parent;
  const std::string folder = parent.path() + "/csv/job";
  {
    const auto log = make_csv_log(folder);
    log->add(8, std::vector<Scalar>{{"Train/Samples/train loss", 2.5}, {"lr", 1e-3}});
    log->add(16, std::vector<Scalar>{{"lr", std::numeric_limits<double>::quiet_NaN()}});
    EXPECT_EQ(content_of(folder + "/lr.csv"), "step,lr\n8,0.001\n16,nan\n") << "before the end";
    EXPECT_THAT(message_of<ConfigurationError>([&] { (void)make_csv_log(folder, 16); }),
                HasSubstr("CSV files in '" + folder + "' are being written by another run; name another"));
  }
  EXPECT_EQ(content_of(folder + "/Train_Samples_train_loss.csv"), "step,train loss\n8,2.5\n");
  std::ofstream(folder + "/lr.csv", std::ios::app) << "24,0.0";  // cut short by a kill
  std::string said;
  make_csv_log(folder, 8, [&said](const std::string& line) {
    said += line;
  })->add(16, std::vector<Scalar>{{"lr", 2}, {"Train/Samples/train loss", 3}});
  EXPECT_EQ(content_of(folder + "/lr.csv"), "step,lr\n8,0.001\n16,2\n");
  EXPECT_EQ(said, "'" + folder + "/lr.csv': 1 row behind 8, from which the run goes on, is removed");
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)make_csv_log(folder); }),
              AllOf(HasSubstr(folder), HasSubstr("has the CSV files of another run")));
}

TEST(ScalarLogs, SayWhereTheyCannotWrite) {
  const TestFolder parent;
  const std::string file = parent.path() + "/file";
  std::ofstream(file) << "x";
  EXPECT_THAT(message_of<IoError>([&] { (void)make_csv_log(file + "/job"); }),
              AllOf(HasSubstr(file + "/job"), HasSubstr("cannot be made: Not a directory")));
  EXPECT_THAT(message_of<IoError>([&] { (void)make_tensorboard_log(file); }), HasSubstr("cannot be made"));
  const std::string folder = parent.path() + "/job";
  const auto log = make_csv_log(folder);
  std::filesystem::create_directory(folder + "/lr.csv");
  EXPECT_THAT(message_of<IoError>([&] { log->add(1, std::vector<Scalar>{{"lr", 1}}); }), HasSubstr("lr.csv"));
}

}  // namespace
}  // namespace tranche::test
