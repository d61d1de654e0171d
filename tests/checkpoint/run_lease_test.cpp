#include "checkpoint/run_lease.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <thread>

#include "../offload/test_folder.h"
#include "core/process.h"
#include "tests/core/error_text.h"

namespace tranche::checkpoint {
namespace {

using namespace tranche::testing;
using test::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr double beat = 0.02, stale = 0.5;

class RunLeaseTest : public ::testing::Test {
 protected:
  LeaseOptions quick() {
    LeaseOptions options{beat, stale, {}};
    options.say = [this](const std::string& line) { said += line; };
    return options;
  }
  RunLease take() { return RunLease::take(folder.path(), quick()); }
  std::string refusal() {
    return message_of<CheckpointError>([&] { (void)take(); });
  }
  std::string content() const {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void write(const std::string& text) const { std::ofstream(path, std::ios::trunc) << text; }
  /// The record that a process on another node would have written.
  static std::string of_another_node(int beats) {
    return nlohmann::json{
        {"host", "node17"}, {"kernel", "0123456789abcdef"}, {"process", 4321}, {"started", 99},
        {"token", "feed"},  {"since", 1'700'000'000},       {"beat", beats}}
        .dump();
  }

  TestFolder folder;
  const std::string path = folder / "run.lock";
  std::string said;
};

TEST_F(RunLeaseTest, AnotherProcessIsRefusedUntilTheHolderHasDied) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const RunLease lease = RunLease::take(folder.path());
    if (::write(ready[1], "x", 1) == 1) ::pause();
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THAT(refusal(), AllOf(HasSubstr(folder.path() + " is in use by process " + std::to_string(child) +
                                         " on node " + detail::this_process().node + ", since 2"),
                               HasSubstr("two runs cannot share a folder")));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_THAT(content(), Not(IsEmpty())) << "the dead gives nothing back";
  RunLease lease = take();
  EXPECT_THAT(said, IsEmpty()) << "whether a process of this kernel lives can be asked: nothing to wait for";
  lease.require_held();
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(RunLeaseTest, AProcessSharesItsLeaseAndGivesItBackAtTheEnd) {
  {
    auto first = std::make_unique<RunLease>(take());
    RunLease second = take();
    first->require_held();
    second.require_held();
    first.reset();
    EXPECT_THAT(content(), IsEmpty());
    second.require_held();  // takes the lease again, now for itself
    EXPECT_THAT(content(), HasSubstr(std::to_string(::getpid())));
  }
  EXPECT_THAT(content(), IsEmpty());
  EXPECT_TRUE(std::filesystem::exists(path)) << "removing it would race with who opens it";
  (void)take();
}

TEST_F(RunLeaseTest, AHolderOnAnotherNodeIsSucceededOnceItsHeartHasStopped) {
  write(of_another_node(7));
  const auto begin = std::chrono::steady_clock::now();
  RunLease lease = take();
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(waited.count(), stale);
  EXPECT_THAT(said,
              HasSubstr("is held by process 4321 on node node17, since 2023-11-14 22:13:20 UTC: waiting"));
  lease.require_held();
}

TEST_F(RunLeaseTest, AHolderOnAnotherNodeThatLivesIsNamed) {
  write(of_another_node(7));
  LeaseOptions patient = quick();
  patient.stale_seconds = 600;
  patient.say = [this](const std::string&) { write(of_another_node(8)); };  // the other process's next beat
  EXPECT_THAT(message_of<CheckpointError>([&] { (void)RunLease::take(folder.path(), patient); }),
              HasSubstr("is in use by process 4321 on node node17"));
}

TEST_F(RunLeaseTest, AHolderThatGivesItBackMeanwhileIsNotWaitedFor) {
  write(of_another_node(7));
  LeaseOptions patient = quick();
  patient.stale_seconds = 600;
  patient.say = [this](const std::string&) { write(""); };
  RunLease::take(folder.path(), patient).require_held();
}

TEST_F(RunLeaseTest, ALeaseThatAnotherTookOverIsLostAndLeftToIt) {
  {
    RunLease lease = take();
    EXPECT_FALSE(lease.lost());
    // The heart may have looked before this is written, and beat once more after it.
    for (int turn = 0; turn < 1000 && !lease.lost(); ++turn) {
      write(of_another_node(1));
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_TRUE(lease.lost());
    EXPECT_THAT(message_of<CheckpointError>([&] { lease.require_held(); }),
                AllOf(HasSubstr("was taken over by process 4321 on node node17"), HasSubstr("stays")));
  }
  EXPECT_EQ(content(), of_another_node(1));
}

TEST_F(RunLeaseTest, TheHolderShowsThatItLives) {
  const RunLease lease = take();
  const std::string first = content();
  for (int turn = 0; turn < 1000 && content() == first; ++turn) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_NE(content(), first);
}

TEST_F(RunLeaseTest, OneThatSomebodyRemovedIsTakenAgain) {
  RunLease lease = take();
  std::filesystem::remove(path);
  lease.require_held();
  EXPECT_THAT(content(), HasSubstr(std::to_string(::getpid())));
}

TEST_F(RunLeaseTest, NothingButAFileIsOpened) {
  ASSERT_EQ(::mkfifo(path.c_str(), 0666), 0);
  EXPECT_THAT(refusal(), HasSubstr("run.lock cannot be written: Invalid argument"));
  std::filesystem::remove(path);
  write("");
  std::filesystem::rename(path, folder / "victim");
  std::filesystem::create_symlink(folder / "victim", path);
  EXPECT_THAT(refusal(), HasSubstr("run.lock cannot be written: Too many levels of symbolic links"));
  EXPECT_TRUE(std::filesystem::is_empty(folder / "victim"));
}

TEST_F(RunLeaseTest, ATornRecordIsSomeonesUntilNothingIsHeardOfThem) {
  write("{\"host\": \"no");
  RunLease lease = take();
  EXPECT_THAT(said, HasSubstr("is held by another process: waiting"));
  lease.require_held();
}

}  // namespace
}  // namespace tranche::checkpoint
